"""Compiles every shipped kernel ahead of time, on a machine with no GPU, and holds it to what is recorded."""
