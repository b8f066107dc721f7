"""A vocabulary whose rows replicas divide among themselves."""
