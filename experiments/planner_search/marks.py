"""Where the curves of the study are read off."""

EVALUATIONS = (1, 3, 5, 10, 20, 30, 40, 60, 80, 100, 120)
SECONDS = (0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0)
