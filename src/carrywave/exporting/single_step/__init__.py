"""One step of a model with its state as arguments, in plain operators: for runtimes without recurrent ones, and as C."""
