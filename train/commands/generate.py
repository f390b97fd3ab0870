"""`ringflash generate`: continues prompts with a trained model, on one device or, under torchrun, over a ring.

ringflash generate --checkpoint runs/tiny-cpu/checkpoints/last --prompt "def "
torchrun --nproc-per-node 4 -m ringflash generate --checkpoint ... --prompt-file book.txt --top-p 0.9
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ringflash.commands.options import REQUIRED, Described, add_shared, parser_of
from ringflash.errors import ArgumentError
from ringflash.train.checkpoint.load import load_decoder
from ringflash.train.commands.launch import inference_dtype, is_first, ranks
from ringflash.train.data.tokenizer import Tokenizer
from ringflash.train.models.generate import Sampling, continue_prompts
from ringflash.train.remote import fetched


def main(argv: Sequence[str]) -> int:
    """Prints each prompt, unless it came from a file, and its continuation."""
    options = _parser().parse_args(argv)
    prompts = _prompts(options)
    sampling = Sampling(options.temperature, options.top_k, options.top_p)
    with ranks(options.device) as (device, context):
        options.checkpoint = fetched(options.checkpoint, "--checkpoint")
        decoder = load_decoder(options.checkpoint, dtype=inference_dtype(device)).to(device)
        named = options.tokenizer
        tokenizer = Tokenizer.of_run(options.checkpoint) if named is None else Tokenizer.load(named)
        new = continue_prompts(
            decoder,
            [torch.tensor(tokenizer.encode_prompt(prompt)) for prompt in prompts],
            options.max_new_tokens,
            replace(sampling, stop_token=tokenizer.end_of_document, vocab_size=tokenizer.vocab_size),
            context=context,
            generator=torch.Generator().manual_seed(options.seed),
        )
        if is_first(context):
            before = [""] if options.prompt_file is not None else prompts
            print(*(prompt + tokenizer.decode(tokens) for prompt, tokens in zip(before, new, strict=True)), sep="\n\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("generate", "Continues prompts with a trained model.")
    add_shared(parser, "debug", checkpoint=REQUIRED, tokenizer=Described("the model's own"), device="auto", seed=0)
    parser.add_argument("--prompt", nargs="+", help='texts to continue, all at once (default: "def ")')
    parser.add_argument("--prompt-file", type=Path, metavar="FILE", help="a text to continue; it is not printed")
    parser.add_argument("--max-new-tokens", type=int, default=400, help="tokens to add, at most (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.7, help="0: the likeliest (default: %(default)s)")
    parser.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="draw from the likeliest that come to P")
    return parser


def _prompts(options: argparse.Namespace) -> list[str]:
    """Returns the texts to continue.

    Raises:
        ArgumentError: both options at once, an empty text, or a file that cannot be read.
    """
    if options.prompt and options.prompt_file is not None:
        raise ArgumentError("--prompt", expected="none with --prompt-file", got=options.prompt, remedy="Give one.")
    prompts = options.prompt or ["def "]
    if options.prompt_file is not None:
        try:
            prompts = [options.prompt_file.read_text(encoding="utf-8")]
        except (OSError, UnicodeDecodeError) as error:
            got, remedy = f"{options.prompt_file}: {error}", "Give a text file."
            raise ArgumentError("--prompt-file", expected="UTF-8 text", got=got, remedy=remedy) from error
    if not all(prompts):
        raise ArgumentError("--prompt", expected="at least one character", got="none", remedy='Try "def ".')
    return prompts
