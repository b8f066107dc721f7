"""Writes the files with which a cluster is asked to train: for Slurm, Kubernetes and SkyPilot."""
