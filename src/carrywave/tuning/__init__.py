"""Trains several runs of one spec, each in a process of its own: a search over keys, and runs that differ by their seed."""
