"""A small cluster emulated on one machine: hosts, shaped links, shares of the cores."""
