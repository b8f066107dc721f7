"""Validates what a user passes to a step, where it enters."""
