"""The decoder, its weights, its loss and its generation."""
