"""What benchmarks share: shapes of models, loops that take turns, workers, memory."""
