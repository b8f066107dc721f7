"""Which workers are alive: heartbeats, lost contact, and why a worker failed."""
