"""Files, rows and frames as they come, and the cache of what was parsed."""
