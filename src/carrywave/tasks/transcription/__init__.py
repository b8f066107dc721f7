"""Transcription: targets that are labels in a row, how outputs become labels again, and how wrong they are."""
