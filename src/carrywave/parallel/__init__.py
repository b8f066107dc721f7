"""The workers that train together: who they are, where they stand, and how they talk."""
