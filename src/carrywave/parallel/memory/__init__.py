"""Memory that workers of one host share, on the host and between GPUs."""
