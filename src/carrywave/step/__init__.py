"""One optimizer step: forward and backward as a schedule says, sums over workers, update."""
