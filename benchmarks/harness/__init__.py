"""What benchmarks share: the command line, clocks and turns, workers, shapes of models."""
