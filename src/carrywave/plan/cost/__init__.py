"""Seconds and bytes of a plan, from measured profiles."""
