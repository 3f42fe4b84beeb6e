"""SANCUS: broadcast whole parts, and skip a broadcast while its last copy is close enough."""
