"""Snapshots on disk: whole or absent, checked, written in the background."""
