"""Which plans there are, what bounds them, and the best one."""
