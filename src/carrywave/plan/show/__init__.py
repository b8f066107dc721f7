"""Presents the chosen plan to people and programs: as text, as a drawing, as data, and with the changes that would improve it."""
