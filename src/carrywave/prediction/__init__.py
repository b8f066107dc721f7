"""Trained runs at work: evaluation, predictions, continuations, step by step, and several runs as one."""
