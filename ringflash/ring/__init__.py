"""Ring plans, and the schedules that run them."""
