"""A vocabulary whose rows replicas divide among themselves, and words that are read with their characters."""
