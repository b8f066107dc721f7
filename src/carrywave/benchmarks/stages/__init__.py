"""The ways to split a step that `bench pipeline` and `bench gpu-pipeline` compare, and the workers of the latter."""
