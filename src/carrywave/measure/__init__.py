"""Times units, optimizer and links as the runtime runs them, in processes of its own."""
