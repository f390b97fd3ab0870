"""`python -m ringflash ...` is `ringflash ...`: what torchrun starts."""

import sys
from pathlib import Path

import ringflash
from ringflash.commands.main import main

if __name__ == "__main__":
    # `-m` puts the working folder before the libraries, where a file of any name could stand for a module of theirs.
    if not Path(ringflash.__file__).is_relative_to(Path.cwd()) and sys.path[:1] in ([""], [str(Path.cwd())]):
        del sys.path[0]
    sys.exit(main())
