"""Optimizers, their state by name, and loss scaling."""
