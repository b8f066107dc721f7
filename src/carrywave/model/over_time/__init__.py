"""What works over several steps besides the recurrent layers: convolutions before them, and the pooling of their outputs."""
