"""Weights in safetensors, read whole or in part, and those of models of transformers."""
