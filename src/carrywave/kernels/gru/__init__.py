"""The backends of GRU layers: which there are, and which runs a layer."""
