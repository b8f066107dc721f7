"""Times units, the optimizer and links as the runtime runs them, in separate processes."""
