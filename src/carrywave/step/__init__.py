"""One optimizer step: run the scheduled forward and backward passes, all-reduce the gradients, update the weights."""
