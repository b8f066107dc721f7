"""One module per claim about speed, memory or recovery, measured side by side with a named peer."""
