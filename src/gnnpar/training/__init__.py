"""The training of one rank. From the command to `Engine.train_epoch` a reader opens, in this order and never back:

    __main__.py, cli/train.py     the command, and how it puts a run together (`run_training`)
    launch/launch.py              ranks as threads, or joined; started ranks go through launch/processes.py
    training/loop.py              prepare, epochs, train_epoch

What `loop.py` uses has a file each: plans, evaluation, measurement, memory, traces, diagnosis, checkpoints, results.
"""
