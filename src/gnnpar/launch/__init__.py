"""Start N ranks of a function and watch them, independently of training."""

ENVIRONMENT = {  # read by torch when a rank imports it
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "KINETO_LOG_LEVEL": "99",  # otherwise the profiler, which measures memory, reports on stderr
    # OpenMP threads that spin for milliseconds at every barrier starve other work on their cores: an epoch of 12 ms
    # took 250 beside it. This bound costs nothing on a quiet machine.
    "GOMP_SPINCOUNT": "100000",
}
