"""Subcommands of `ringflash` that train or use a trained model."""
