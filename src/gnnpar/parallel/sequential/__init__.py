"""SAR: sequential aggregation and rematerialization, on ranks or out of core."""
