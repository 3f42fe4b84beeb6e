"""Classes of plans by their exactness."""

from typing import Literal

Quality = Literal["exact", "rounded", "quantized", "stale", "sampled"]
QUALITIES: tuple[Quality, ...] = ("exact", "rounded", "quantized", "stale", "sampled")
