"""Series with targets at every step: read block by block, with what is missing in inputs and targets."""
