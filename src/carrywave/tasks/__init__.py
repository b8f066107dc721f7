"""Language, classification, tagging, regression, forecasting: a view of the data, a network and metrics for each."""
