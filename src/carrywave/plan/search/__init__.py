"""Enumerates plans, bounds their step times, and finds the best one."""
