"""What `gnnpar check` runs: conformance with the single device, laws of codecs."""
