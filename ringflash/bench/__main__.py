"""`python -m ringflash.bench NAME ...` is `ringflash bench NAME ...`: what torchrun starts."""

import sys

from ringflash.commands.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
