"""The LSTM layer itself on each device, keyed randomness, and the kernels around it."""
