"""Public functions, their autograd operators and their checks."""
