"""The carry under its public address; it is defined with the kernels, which pass it."""

from carrywave.kernels.carry import Carries, Carry

__all__ = ["Carries", "Carry"]
