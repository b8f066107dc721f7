"""Runs the forward and backward passes of a step on one worker, task by task."""
