"""Tile kernels in Triton, for any GPU that Triton compiles for."""
