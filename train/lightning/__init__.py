"""The Lightning strategy and modules."""
