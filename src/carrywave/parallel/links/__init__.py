"""Messages between neighbouring stages: through process groups (gloo, NCCL), or straight into the neighbour's device memory."""
