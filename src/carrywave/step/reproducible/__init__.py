"""Results whose bits do not depend on the number of replicas: canonical shards and a fixed summation tree."""
