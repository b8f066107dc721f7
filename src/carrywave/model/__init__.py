"""Encoders, the stacked LSTM, heads, and the stages they are cut into."""
