"""One module for each claim about speed, memory or quality: `python -m benchmarks.NAME [--quick] [--json FILE]`, from a clone."""
