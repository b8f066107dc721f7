"""The engines that start processes on several hosts, and how each of them, or the user, names those hosts."""
