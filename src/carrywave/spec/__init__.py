"""The spec: what the user asked for, with validation, defaults and reference text. Torch-free."""
