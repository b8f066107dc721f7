"""The tasks, each with a view of the data, a network and metrics: language, classification, tagging, regression, forecasting."""
