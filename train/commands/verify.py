"""`ringflash checkpoint verify`: compares checkpoints with their manifests, without loading them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ringflash.commands.options import add_shared, parser_of
from ringflash.errors import ArgumentError, CheckpointCorrupt
from ringflash.train.checkpoint.manifest import complete_in, locate, verify
from ringflash.train.remote import fetched


def main(argv: Sequence[str]) -> int:
    """Prints a line a checkpoint; returns 1 when one of them is damaged.

    Raises:
        ArgumentError: the first argument is not "verify".
        CheckpointError: a folder is no complete checkpoint and holds none.
    """
    if argv and argv[0] in ("-h", "--help"):
        row = "  verify    compare checkpoints with what was saved, without opening them"
        print(f"usage: ringflash checkpoint COMMAND [ARGUMENTS]\n\n{row}\n\nIt explains itself with --help.")
        return 0
    if argv[:1] != ["verify"]:
        got, remedy = repr(argv[0]) if argv else "nothing", "Run `ringflash checkpoint verify FOLDER`."
        raise ArgumentError("checkpoint", expected="verify", got=got, remedy=remedy)
    parser = parser_of("checkpoint verify", "Compares checkpoints with what was saved.")
    parser.add_argument(
        "folders", nargs="+", help="checkpoints, or folders of them, as runs/x/checkpoints; at a URL the newest one"
    )
    add_shared(parser, "debug")
    damaged = False
    for folder in (fetched(name, "folders") for name in parser.parse_args(argv[1:]).folders):
        for path in complete_in(folder) or [locate(folder)]:
            try:
                manifest = verify(path)
            except CheckpointCorrupt as error:
                print(f"ringflash: {error}", file=sys.stderr)
                damaged = True
                continue
            size = sum(size for size, _ in manifest.files.values())
            step = "no step" if manifest.step is None else f"step {manifest.step}"
            print(f"{path}: {step}, {len(manifest.files)} files, {size:,} bytes, as saved")
    return 1 if damaged else 0
