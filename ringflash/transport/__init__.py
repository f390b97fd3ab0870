"""How tensors move between the ranks of a ring; every communication call of the library is in this package."""
