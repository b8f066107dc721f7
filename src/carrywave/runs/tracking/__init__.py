"""Copies of a run's metrics in trackers such as MLflow."""
