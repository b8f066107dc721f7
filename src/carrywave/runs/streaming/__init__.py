"""Streaming inference: a step function for many clients at once, and what each of them carries from step to step."""
