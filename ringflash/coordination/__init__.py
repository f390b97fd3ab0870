"""Agreement of ranks before a call, and handling of failures during a call."""
