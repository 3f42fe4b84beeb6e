"""The subcommands of `gnnpar`, one file each: `run(argv) -> exit code`."""
