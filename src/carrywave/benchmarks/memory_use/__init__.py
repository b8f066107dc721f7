"""Benchmarks of the memory that training takes."""
