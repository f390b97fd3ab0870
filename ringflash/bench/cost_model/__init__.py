"""Cost model of rings, and its command."""
