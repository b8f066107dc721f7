"""Several workers on one GPU, each with a share of it: for tests and benchmarks."""
