"""Agreement of ranks before a call, and failures in the middle of one."""
