"""Checks of `gnnpar check`: conformance with the single device, laws of codecs."""
