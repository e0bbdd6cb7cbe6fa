"""Finished runs and comparisons as tables, plots and pages; nothing here trains."""
