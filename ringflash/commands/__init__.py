"""The command `ringflash`."""
