"""halo=cover: fold cut edges at their sources where that sends fewer rows.

`partition/cover.py` finds the least cover, `folds/mergeable.py` says how partial results merge.
"""
