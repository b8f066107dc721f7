"""CUDA sources compiled at first use, and what all of our CUDA kernels share."""
