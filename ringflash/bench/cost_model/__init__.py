"""A model of what a ring costs, and its command."""
