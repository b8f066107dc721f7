"""Who is alive: heartbeats, lost contact, and why a worker failed."""
