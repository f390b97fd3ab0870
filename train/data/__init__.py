"""Token files, samples of them, and the data module."""
