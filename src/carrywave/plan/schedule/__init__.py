"""Schedules as data: tasks of each stage, messages between stages, and the proof that they cannot hang."""
