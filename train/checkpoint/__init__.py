"""Sharded checkpoints: save, verify, load."""
