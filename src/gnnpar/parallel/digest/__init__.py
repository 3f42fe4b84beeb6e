"""DIGEST: halo rows from a table that is refreshed every few epochs."""
