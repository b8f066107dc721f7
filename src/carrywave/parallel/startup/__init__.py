"""How workers find each other, and checks for environment settings that would prevent it."""
