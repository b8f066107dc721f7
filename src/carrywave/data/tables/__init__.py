"""Tables as time series: columns, times, frequency, scale."""
