"""Classes of plans by what they do to the numbers."""

from typing import Literal

Quality = Literal["exact", "rounded", "quantized", "stale", "sampled"]
QUALITIES: tuple[Quality, ...] = ("exact", "rounded", "quantized", "stale", "sampled")
