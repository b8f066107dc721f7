"""Runtime compilation of CUDA sources, and code shared by our CUDA kernels."""
