"""What the user asked for: the spec, its keys in words, its defaults. Torch-free."""
