"""Entry for torchrun: `python -m ringflash.bench NAME ...` is the same as `ringflash bench NAME ...`."""

import sys

from ringflash.commands.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
