"""`ringflash prepare`: its arguments, and the message at its end."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import get_args

from rich.console import Console

from ringflash.commands.options import REQUIRED, Described, add_shared, parser_of
from ringflash.errors import ArgumentError, DataError
from ringflash.train.data.chat import Chat, Learn
from ringflash.train.data.prepare import SHARD_BYTES, Recipe, prepare, skipped_rows
from ringflash.train.data.sources import MAX_LINE
from ringflash.train.data.tokenizer import BYTES, Tokenizer
from ringflash.train.preference.chat import PairChat

REPORTED = 5  # skipped rows that the end of a preparation describes
DESCRIPTION = """Turns text or conversations into token files, which `ringflash train` reads with --data.corpus=FOLDER.

SOURCES are files, folders and globs: .jsonl and .ndjson (a document a line), .parquet (a document a row), folders of
datasets' save_to_disk, and any other file, which is a document of UTF-8 text. Lines and text may be compressed: .gz,
and .zst with the package zstandard. Run it again when it was interrupted: what is finished is checked and kept.

With --chat, rows are conversations: {"messages": [{"role": ..., "content": ...}, ...]}, with "tools" if there are
any, or {"prompt": ..., "completion": ...}, where "response" may stand for "completion". The chat template of
--tokenizer renders them, and training learns the turns that --learn names.

With --pairs, rows are preferences for `ringflash dpo`: {"prompt": ..., "chosen": ..., "rejected": ...}, each as text or
as a list of messages. Without "prompt", "chosen" and "rejected" are whole conversations that begin alike."""


def main(argv: Sequence[str]) -> int:
    """Runs `ringflash prepare ...` and returns its exit code."""
    parser = parser_of("prepare", DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", metavar="SOURCES", help='see above; "stdlib" is Python\'s own sources')
    add_shared(parser, to=REQUIRED, tokenizer=BYTES)
    parser.add_argument("--end-of-document", metavar="TOKEN", help="the token after each document (default: its EOS)")
    parser.add_argument(
        "--begin-of-document", metavar="TOKEN", help="a token before each document of text (default: none)"
    )
    parser.add_argument("--text-field", default="text", help="field or column of the text (default: %(default)s)")
    parser.add_argument("--chat", action="store_true", help="rows are conversations; needs transformers")
    parser.add_argument("--pairs", action="store_true", help="rows are preferences; needs transformers")
    parser.add_argument("--learn", choices=get_args(Learn), help="turns that --chat learns (default: assistant)")
    parser.add_argument(
        "--skip-bad", action="store_true", help="leave out rows that are no documents, and report them at the end"
    )
    parser.add_argument(
        "--max-line-mib", type=int, default=MAX_LINE >> 20, help="of a line of JSON, at most (default: %(default)s)"
    )
    add_shared(parser, "val_fraction", "debug", processes=Described("one a core"))
    parser.add_argument(
        "--shard-mib", type=int, default=SHARD_BYTES >> 20, help="of text a file (default: %(default)s)"
    )
    options = parser.parse_args(argv)

    console = Console(stderr=True)
    if options.learn and not options.chat:
        raise ArgumentError("--learn", expected="--chat beside it", got="none", remedy="Add --chat, or leave it out.")
    if options.pairs and options.chat:
        remedy = "Leave --chat out: rows of preferences are rendered in the same way."
        raise ArgumentError("--pairs", expected="no --chat beside it", got="both", remedy=remedy)
    if options.begin_of_document and (options.chat or options.pairs):
        raise ArgumentError(
            "--begin-of-document",
            expected=f"none with --{'chat' if options.chat else 'pairs'}",
            got=options.begin_of_document,
            remedy="Leave it out: the chat template writes the tokens around a conversation.",
        )
    tokenizer = Tokenizer.load(options.tokenizer, options.end_of_document, options.begin_of_document)
    chat = Chat.load(options.tokenizer, options.learn or "assistant") if options.chat else None
    if options.pairs:
        chat = PairChat.load(options.tokenizer)
    try:
        files = prepare(
            options.sources,
            options.to.expanduser(),
            Recipe(tokenizer, options.text_field, chat, options.skip_bad, options.max_line_mib << 20),
            processes=len(os.sched_getaffinity(0)) if options.processes is None else options.processes,
            val_fraction=options.val_fraction,
            shard_bytes=options.shard_mib << 20,
            console=console,
        )
    except OSError as error:
        remedy = "Make room or name another folder, and run it again: finished files are kept."
        expected = "a folder that can be written, with room in it"
        raise DataError("--to", expected=expected, got=str(error), remedy=remedy) from error
    except KeyboardInterrupt:
        print("ringflash: interrupted. Run it again to go on: finished files are kept.", file=sys.stderr)
        return 130
    header = files.header
    total, first = skipped_rows(files.folder, REPORTED)
    if total:
        print(
            f"ringflash: skipped {total:,} bad row(s); {files.folder}/tokens-*.skipped.jsonl lists them all.",
            file=sys.stderr,
        )
        print(*(f"  {row}" for row in first), *(["  ..."] if total > len(first) else []), sep="\n", file=sys.stderr)
    learnt = "" if header.num_learnt is None else f", {header.num_learnt:,} of them to learn,"
    print(
        f"{options.to}: {header.num_tokens:,} tokens{learnt} in {header.num_documents:,} documents and "
        f"{len(header.shards)} files, of {tokenizer.name}"
    )
    if options.pairs:
        print(f"  ringflash dpo: --data.corpus={options.to}")
        return 0
    documents = " --data.documents=whole" if options.chat else ""
    print(
        f"  ringflash train: --data.corpus={options.to}{documents} --model.model.vocab_size={files.vocab_size}\n"
        f"  ringflash finetune: --data.corpus={options.to}{documents}"
    )
    return 0
