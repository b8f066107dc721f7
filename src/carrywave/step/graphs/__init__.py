"""CUDA graphs: work recorded once and replayed."""
