"""Tile kernels in PyTorch, for any device and float64."""
