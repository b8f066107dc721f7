"""What happens before the first step: the folder, the data, the plan and the model, the same on every worker."""
