"""Benchmarks of the library and its peers in the same run; they are commands, never timed tests."""
