"""How long tests wait for what should come."""

PATIENCE = 400.0  # seconds for a process to end or to get to a step: cores may be busy, and imports alone take seconds
