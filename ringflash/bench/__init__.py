"""Measurements, peers beside us in the same run; run as commands, never as timed tests."""
