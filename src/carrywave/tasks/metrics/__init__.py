"""Metrics: sums that are added up on the device, and over all workers."""
