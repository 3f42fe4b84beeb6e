"""AdaQP's choice of bits: traces, importance, the optimization problem and its solvers."""
