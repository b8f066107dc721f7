"""How one training step is split over devices and time, what each split costs, and which is best. Torch-free."""
