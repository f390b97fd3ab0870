"""Ways to cut a global sequence over ranks."""
