"""The subcommands of `gnnpar`, one file each: `run(argv) -> exit code`. main.py runs them by name."""
