"""Benchmark of training."""
