"""Persistent LSTM kernels for Hopper GPUs: layout, launches, and the wave over layers."""
