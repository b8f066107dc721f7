"""The workers of `bench sync`, and the slow links between them."""
