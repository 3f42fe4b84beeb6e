"""Start N ranks of a function and watch them, independently of training."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

ENVIRONMENT = {  # read by torch when a rank imports it
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "KINETO_LOG_LEVEL": "99",  # otherwise the profiler, which measures memory, reports on stderr
    # OpenMP threads that spin for milliseconds at every barrier starve other work on their cores: a concurrent epoch
    # of 12 ms took 250 ms. This bound costs nothing on an idle machine.
    "GOMP_SPINCOUNT": "100000",
}


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Set environment variables, and restore them at the end."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
