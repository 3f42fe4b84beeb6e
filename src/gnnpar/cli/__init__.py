"""The subcommands of `gnnpar`, one file each: `run(argv) -> exit code`. main.py calls them by name."""
