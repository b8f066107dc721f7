"""Shows a run to people: one HTML page with its curves, its plan, its step and samples, or several runs side by side."""
