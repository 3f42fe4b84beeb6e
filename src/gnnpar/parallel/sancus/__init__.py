"""SANCUS: whole parts broadcast, skipped while the copy of the last time will do."""
