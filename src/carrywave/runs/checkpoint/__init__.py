"""Snapshots on disk: complete or absent, verified, written in the background."""
