"""The backends of LSTM layers: which there are, and which runs a layer."""
