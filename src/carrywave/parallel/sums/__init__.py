"""What workers add up or exchange as a group: sums, and the rows of a shared vocabulary."""
