"""Other libraries' models on ringflash's attention."""
