"""From files and Python objects to batches: reading, order, loading."""
