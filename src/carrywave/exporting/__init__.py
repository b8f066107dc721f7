"""`carrywave export`: writes a trained model for other runtimes, and checks what was written by running it."""
