"""What `bench plan` trains on one device: recipes of examples/, and how their steps are timed and predicted."""
