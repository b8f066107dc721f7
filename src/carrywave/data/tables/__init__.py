"""Read tables as time series: columns, times, frequency, scale."""
