"""What carrywave is compared with: training loops in plain PyTorch."""
