"""The training of one rank. The path from the command to `Engine.train_epoch`:

__main__.py, cli/train.py     the command, which assembles a run (`run_training`)
launch/launch.py              ranks as threads, or joined; started ranks go through launch/processes.py
training/loop.py              prepare, epochs, train_epoch

`loop.py` uses one file each for plans, measurement, traces, diagnosis, checkpoints and results.
"""
