"""Time that tests wait for an event."""

# Seconds for a process to end or to reach a step: the cores may be busy, and imports alone take seconds.
PATIENCE = 400.0
