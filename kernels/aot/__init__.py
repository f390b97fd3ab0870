"""Compiles every shipped kernel ahead of time, without a GPU, and compares each with its recorded allowance."""
