"""The ops as torch sees them: schemas, shapes for tracing, and the public functions that call them.

Registered through torch.library, so that torch.compile and CUDA graphs work over them: 2 us a call on a CPU. An op that
updates a tensor in place is a second schema with a trailing underscore, as outputs must not alias inputs.
"""
