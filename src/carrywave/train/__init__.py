"""Turns a spec into trained weights: planning, the training loop, checkpoints, and how a run ends."""
