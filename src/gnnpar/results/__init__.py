"""What runs leave behind, read back and compared."""
