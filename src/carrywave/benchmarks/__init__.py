"""One module for each claim about speed or memory: ours and a named peer side by side."""
