"""Read files, rows and data frames, and cache the parsed result."""
