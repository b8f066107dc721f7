"""The folder of a run: its files and their owner, its summary, evaluation, prediction."""
