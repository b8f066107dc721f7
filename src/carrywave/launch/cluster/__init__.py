"""Launchers of several hosts in step with each other: what they tell, through what, who decides, and what each does."""
