"""Weights from elsewhere: embeddings as text, layers of torch."""
