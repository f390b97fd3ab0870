"""Ring attention in the Trainer of transformers, and in loops that accelerate runs."""
