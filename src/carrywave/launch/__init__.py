"""Starts workers on this host, watches them, restarts them, and reports how they ended."""
