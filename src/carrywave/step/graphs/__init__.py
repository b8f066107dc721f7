"""CUDA graphs: work that is captured once and replayed."""
