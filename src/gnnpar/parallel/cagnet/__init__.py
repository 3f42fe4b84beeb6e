"""CAGNET: whole parts broadcast, block by block."""
