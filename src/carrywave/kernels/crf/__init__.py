"""The chain of a conditional random field over labels: its definition in torch's operations, and kernels for CUDA."""
