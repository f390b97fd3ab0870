"""Public functions, their operators, derivatives and checks."""
