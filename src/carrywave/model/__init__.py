"""Encoders, the stacked LSTM, heads, and the stages a model is split into."""
