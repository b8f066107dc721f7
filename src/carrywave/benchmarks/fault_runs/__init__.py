"""Real training commands whose workers are harmed, for `bench faults` and the tests of faults."""
