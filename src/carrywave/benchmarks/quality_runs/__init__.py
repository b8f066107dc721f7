"""What `bench quality` is made of: its data sets, and the child processes that train on them."""
