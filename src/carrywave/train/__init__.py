"""From a spec to trained weights: the loop, its plan, its checkpoints and its end."""
