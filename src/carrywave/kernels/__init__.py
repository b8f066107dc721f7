"""Layers of cells and their backends for each device, keyed randomness, and the kernels around them."""
