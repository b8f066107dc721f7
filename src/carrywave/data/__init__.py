"""Turn files and Python objects into batches: reading, ordering, loading."""
