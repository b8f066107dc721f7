"""Replicas that do not exchange at every step: local averaging, DiLoCo, asynchronous training."""
