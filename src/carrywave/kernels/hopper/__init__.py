"""Persistent LSTM kernels for Hopper GPUs: layout, launches, and the wavefront over layers."""
