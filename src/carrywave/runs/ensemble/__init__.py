"""Several trained runs as one: their predictions are averaged in the units of the data, and metrics are those of the average."""
