"""The commands, and what a person sees of a run."""
