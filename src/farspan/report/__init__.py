"""Records become pictures and pages."""
