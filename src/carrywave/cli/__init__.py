"""The command line: commands, progress display, and exit codes."""
