"""Layouts: cuts of a global sequence over ranks."""
