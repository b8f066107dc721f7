"""Schedules as data: the tasks of each stage, the messages between stages, and the proof that they cannot deadlock."""
