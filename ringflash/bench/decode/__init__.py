"""Benchmark of flash_decode."""
