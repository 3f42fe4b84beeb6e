"""report.html: one page that needs no network."""
