"""Finds or measures the profile of this machine: times units, the optimizer and links as the runtime runs them, in separate processes."""
