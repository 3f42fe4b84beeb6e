"""Where the curves of the study are read off."""

EVALUATIONS = (1, 3, 10, 20, 30, 50, 75, 100, 150, 200)
SECONDS = (0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 3.0, 5.0)
