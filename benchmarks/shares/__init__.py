"""Shares of a GPU under NVIDIA's MPS, for trying out and testing plans."""

from benchmarks.shares.mps import shares

__all__ = ["shares"]
