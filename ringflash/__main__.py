"""`python -m ringflash ...` is `ringflash ...`: what torchrun starts."""

import sys

from ringflash.cli import main

if __name__ == "__main__":
    sys.exit(main())
