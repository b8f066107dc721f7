"""How workers find each other, and what in the environment would keep them from it."""
