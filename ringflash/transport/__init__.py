"""Transports that move tensors between the ranks of a ring. No other package posts the messages of a ring."""
