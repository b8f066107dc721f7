"""Optimizers, their state by parameter name, and loss scaling."""
