"""LSTM backends for each device, keyed randomness, and the kernels around the LSTM."""
