"""The folder of a run: its files and its owner, summary, evaluation, prediction."""
