"""Fast torch bodies for a CPU; same names and signatures as `naive`, which defines them."""
