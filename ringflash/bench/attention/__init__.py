"""Benchmarks of attention on one device."""
