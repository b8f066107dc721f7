"""Checks that a user's own modules give the same answer however the work is split."""
