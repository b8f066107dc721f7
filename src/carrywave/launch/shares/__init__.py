"""Shares of a GPU under NVIDIA's MPS, for trying out and testing plans."""

from carrywave.launch.shares.mps import shares

__all__ = ["shares"]
