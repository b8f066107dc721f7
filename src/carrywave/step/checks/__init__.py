"""What a user brings to a step, checked where it enters."""
