"""Predictions row by row: blocks of rows read in bounded memory, what is predicted for each, and the file or pipe they are written to."""
