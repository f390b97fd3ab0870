"""Integration with Hugging Face transformers: the attention function, its masks, positions, RoPE and checks."""
