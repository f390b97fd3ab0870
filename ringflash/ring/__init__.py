"""Plans of a ring, and the schedules that run them."""
