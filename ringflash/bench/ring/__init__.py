"""Benchmarks of attention over ranks."""
