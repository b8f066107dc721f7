"""Predicts the time and memory of a plan from measured profiles."""
