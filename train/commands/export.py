"""`ringflash export`: a trained decoder as a folder that transformers loads: config.json and safetensors."""

from __future__ import annotations

import argparse
import copy
import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError
from torch import Tensor

from ringflash.commands.options import DTYPES, REQUIRED, add_shared, parser_of
from ringflash.errors import CheckpointError, ConfigError, DataError
from ringflash.train.checkpoint.load import load_adapted, load_decoder, load_transformers, read_state
from ringflash.train.checkpoint.manifest import partial_of, sync
from ringflash.train.data.chat import CHAT_TEMPLATE, Chat
from ringflash.train.data.tokenizer import RUN_FOLDER, Tokenizer
from ringflash.train.models.adapter_folder import save_adapter
from ringflash.train.models.config import Family, ModelConfig
from ringflash.train.models.huggingface import CONFIG, FAMILIES, FULL, SLIDING
from ringflash.train.models.lora import BASE, BASE_DIGEST, LORA, is_adapter, merge_adapters
from ringflash.train.models.weights import MAX_FILE_BYTES, write
from ringflash.train.remote import fetched

GENERATION = "generation_config.json"


def main(args: Sequence[str]) -> int:
    """Runs `ringflash export ...` and returns its exit code."""
    parser = parser_of("export", __doc__)
    add_shared(parser, "debug", checkpoint=REQUIRED, to=REQUIRED, dtype="float32")
    parser.add_argument(
        "--max-position-embeddings", type=int, help="longest sequence the model is for, unless its configuration says"
    )
    parser.add_argument("--adapter", action="store_true", help="of a LoRA run: the adapters alone, as peft loads them")
    parser.add_argument("--base", help="of a LoRA run: folder or name of its base model, if it is no longer in place")
    options = parser.parse_args(args)
    to = options.to
    check_new(to)
    options.checkpoint = fetched(options.checkpoint, "--checkpoint")
    tokenizer = tokenizer_of(options.checkpoint)
    path, rest = read_state(options.checkpoint)
    model_config = rest.get("model_config")
    if isinstance(model_config, dict) and LORA in model_config:
        return _export_adapted(path, rest, options, tokenizer)
    for name in ("adapter", "base"):
        if getattr(options, name):
            remedy = f"Leave --{name} out: the checkpoint holds a whole model."
            raise ConfigError(f"--{name}", expected="a checkpoint of a LoRA run", got=options.checkpoint, remedy=remedy)
    if isinstance(model_config, dict) and "model_type" in model_config:
        model = load_transformers(path, DTYPES[options.dtype], model_config)
        _set_positions(model, options)
        save_transformers(model, to, tokenizer)
        count = sum(p.numel() for p in model.parameters())
        print(f"{to}: {model_config['model_type']}, {count:,} parameters in {options.dtype}")
        return 0
    decoder = load_decoder(options.checkpoint, dtype=DTYPES[options.dtype])
    config = decoder.config
    if options.max_position_embeddings is not None:
        config = replace(config, max_position_embeddings=options.max_position_embeddings)
    save(dict(decoder.named_parameters()), config, to, options.dtype, tokenizer=tokenizer)
    print(f"{to}: {family_of(config)}, {sum(p.numel() for p in decoder.parameters()):,} parameters in {options.dtype}")
    return 0


def _set_positions(model: Any, options: argparse.Namespace) -> None:
    """Sets the length that the exported configuration names, if one was asked for.

    Raises:
        ConfigError: the model would compute something else with another length, or could not be loaded.
    """
    from transformers import AutoModelForCausalLM

    longest = options.max_position_embeddings
    if longest is None:
        return
    before = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    config = copy.deepcopy(model.config)
    config.get_text_config().max_position_embeddings = longest
    with torch.device("meta"):
        shapes = {name: x.shape for name, x in AutoModelForCausalLM.from_config(config).named_parameters()}
    tables = [name for name, x in model.named_parameters() if shapes.get(name) != x.shape]
    if before != longest and (tables or _rope_follows_length(config.get_text_config())):
        raise ConfigError(
            "--max-position-embeddings",
            expected=f"{before}: {f'{tables[0]} has a row a position' if tables else 'the RoPE depends on it'}",
            got=longest,
            remedy="Leave it out: with another length the exported model would not be the trained one.",
        )
    model.config.get_text_config().max_position_embeddings = longest


def _rope_follows_length(config: Any) -> bool:
    """Returns whether transformers computes a model's RoPE from max_position_embeddings."""
    given = getattr(config, "rope_parameters", None) or {}
    ropes = [given, *(rope for rope in given.values() if isinstance(rope, dict))]  # one for each kind of layer
    kinds = {rope.get("rope_type") for rope in ropes if rope.get("rope_type") != "yarn" or rope.get("factor") is None}
    return not kinds.isdisjoint(("dynamic", "longrope", "yarn"))


def _export_adapted(
    path: Path, rest: dict[str, Any], options: argparse.Namespace, tokenizer: RunTokenizer | None
) -> int:
    """Writes the adapters of a LoRA run, merged into its base model, or alone."""
    to, dtype = Path(options.to), DTYPES[options.dtype]
    base = str(options.base or rest[BASE])
    model = load_adapted(path, rest, base)
    if options.adapter:
        if options.max_position_embeddings is not None:
            remedy = "Leave it out: adapters have no configuration of the model."
            raise ConfigError(
                "--max-position-embeddings",
                expected="nothing with --adapter",
                got=options.max_position_embeddings,
                remedy=remedy,
            )
        adapters = {name: x.to(dtype) for name, x in model.named_parameters() if is_adapter(name)}
        digest = rest["model_config"][BASE_DIGEST]
        write_folder(to, lambda partial: save_adapter(model, adapters, base, digest, partial))
        print(f"{to}: adapters of {base}, {sum(x.numel() for x in adapters.values()):,} parameters in {options.dtype}")
        return 0
    merge_adapters(model)
    _set_positions(model, options)
    save_transformers(model.to(dtype), to, tokenizer)
    count = sum(x.numel() for x in model.parameters())
    print(f"{to}: {base} and its adapters, {count:,} parameters in {options.dtype}")
    return 0


def save(
    tensors: Mapping[str, Tensor],
    config: ModelConfig,
    folder: Path,
    dtype: str = "float32",
    max_file_bytes: int = MAX_FILE_BYTES,
    tokenizer: RunTokenizer | None = None,
) -> None:
    """Writes a decoder's `tensors` by name and `config` to the new `folder`, completely or not at all.

    With `tokenizer`, the folder holds its files too, and transformers stops at the same token as the run's own
    generation.

    Raises:
        ConfigError: transformers has no model of this shape.
        CheckpointError: `folder` exists already, or cannot be written.
    """
    values = to_transformers(config, dtype)
    if tokenizer is not None:
        values["eos_token_id"] = tokenizer.ends

    def fill(partial: Path) -> None:
        write(tensors, partial, DTYPES[dtype], max_file_bytes)
        (partial / CONFIG).write_text(json.dumps(values, indent=2) + "\n")
        if tokenizer is not None:
            write_tokenizer(tokenizer, partial, config.vocab_size)

    write_folder(folder, fill)


def save_transformers(model: Any, folder: Path, tokenizer: RunTokenizer | None = None) -> None:
    """Writes a transformers model to the new `folder`, completely or not at all.

    Raises:
        CheckpointError: `folder` exists already, or cannot be written.
    """

    def fill(partial: Path) -> None:
        if tokenizer is not None:
            model.config.eos_token_id = tokenizer.ends
        model.save_pretrained(partial)
        mode = (partial / CONFIG).stat().st_mode
        for file in partial.glob("*.safetensors"):
            file.chmod(mode)  # safetensors makes files private
        if tokenizer is not None:
            write_tokenizer(tokenizer, partial, model.config.get_text_config().vocab_size)

    write_folder(folder, fill)


@dataclass(frozen=True)
class RunTokenizer:
    """Tokenizer of a run, and the chat template in the same folder.

    Args:
        tokenizer: tokenizer of the run's text.
        chat_template: chat template of transformers; None if the run has none.
    """

    tokenizer: Tokenizer
    chat_template: str | None = None

    @cached_property
    def ends(self) -> int | list[int]:
        """Tokens at which generation stops: the end of a document and, with a chat template, the end of a turn."""
        end, turn = self.tokenizer.end_of_document, None
        if self.chat_template is not None:
            try:
                turn = Chat(self.chat_template).turn_end(self.tokenizer)
            except DataError as error:
                print(f"ringflash: generation stops at the end of a document alone. {error}", file=sys.stderr)
        return end if turn in (None, end) else [end, turn]


def tokenizer_of(checkpoint: str | Path) -> RunTokenizer | None:
    """Returns the tokenizer of a checkpoint's run; None, with a printed line that says so, if there is none."""
    try:
        tokenizer = Tokenizer.of_run(checkpoint)
    except DataError:
        print("ringflash: no tokenizer in the run's folder: the exported folder has no token ids", file=sys.stderr)
        return None
    start = Path(checkpoint).expanduser().absolute()
    for folder in (start, *start.parents[:3]):
        if (template := folder / RUN_FOLDER / CHAT_TEMPLATE).is_file():
            return RunTokenizer(tokenizer, template.read_text(encoding="utf-8"))
    return RunTokenizer(tokenizer)


def write_tokenizer(run: RunTokenizer, folder: Path, vocab_size: int) -> None:
    """Writes tokenizer files and generation_config.json, so that transformers encodes and stops as the run does.

    Training adds no special tokens around a document, so the exported tokenizer adds none. Without a padding token of
    the tokenizer's own, the end of a document pads in generation only: in config.json it would exclude that token from
    later training.

    Args:
        run: tokenizer of the run.
        folder: folder of the exported model.
        vocab_size: number of ids of the model, which may be more than the tokenizer's.
    """
    tokenizer = run.tokenizer
    if tokenizer.model is not None:
        content = json.loads(tokenizer.model) | {"post_processor": None}
        replace(tokenizer, model=json.dumps(content, ensure_ascii=False)).save(folder)
    else:
        tokenizer.save(folder)
    if run.chat_template is not None:
        (folder / CHAT_TEMPLATE).write_text(run.chat_template, encoding="utf-8")
    # What the base model of LoRA had stays: how it samples, and further tokens at which it stops.
    file, pad = folder / GENERATION, tokenizer.pad_id
    values: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    values["eos_token_id"] = _joined(run.ends, values.get("eos_token_id"))
    values["pad_token_id"] = tokenizer.end_of_document if pad is None else pad
    if unused := [*range(tokenizer.vocab_size, vocab_size)]:
        values["suppress_tokens"] = unused
    file.write_text(json.dumps(values, indent=2) + "\n")


def _joined(ends: int | list[int], others: int | list[int] | None) -> int | list[int]:
    """Returns the ids of both, each once; a single one as a number."""
    lists = [x if isinstance(x, list) else [] if x is None else [x] for x in (ends, others)]
    joined = list(dict.fromkeys(token for tokens in lists for token in tokens))
    return joined[0] if len(joined) == 1 else joined


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Lets `fill` write a temporary folder, and renames it to the new `folder` when it is complete.

    Raises:
        CheckpointError: `folder` exists already, or cannot be written.
    """
    check_new(folder)
    partial = partial_of(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)  # left by a killed export
        partial.mkdir()
        fill(partial)
        for path in (*partial.iterdir(), partial):
            sync(path)
        partial.rename(folder)
        sync(folder.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        remedy = "Look at the space and rights on its file system; nothing is left there."
        raise CheckpointError(str(folder), expected="a place to write to", got=str(error), remedy=remedy) from error


def check_new(folder: Path) -> None:
    """Raises CheckpointError if something exists at `folder`."""
    if folder.exists() or folder.is_symlink():
        remedy = "Name a new folder; nothing was changed."
        raise CheckpointError(str(folder), expected="nothing there yet", got="a file or folder", remedy=remedy)


def to_transformers(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """Returns a config.json for `config` that transformers 4 and 5 read, without the tokenizer's token ids.

    Args:
        config: shape of the decoder.
        dtype: dtype of the weights, for instance "bfloat16".

    Raises:
        ConfigError: no family has this shape, or the family of `config.family` does not; or no length is known.
    """
    family = family_of(config)
    if config.max_position_embeddings is None:
        expected = "the longest sequence that the model is meant for"
        remedy = "Pass --max-position-embeddings, or set it."
        raise ConfigError("max_position_embeddings", expected=expected, got=None, remedy=remedy)
    scaling = {} if config.rope_scaling is None else asdict(config.rope_scaling)
    rope = {name: value for name, value in scaling.items() if value is not None}
    if rope.get("rope_type") == "dynamic":
        del rope["original_max_position_embeddings"]  # transformers uses max_position_embeddings
    values: dict[str, Any] = {
        "architectures": [FAMILIES[family].architecture],
        "model_type": family,
        "torch_dtype": dtype,
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.headdim,
        "intermediate_size": config.ffn_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        # transformers 4 reads the first two keys, transformers 5 all three.
        "rope_theta": config.rope_theta,
        "rope_scaling": rope or None,
        "rope_parameters": {"rope_type": "default", **rope, "rope_theta": config.rope_theta},
        "attention_dropout": 0.0,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }
    if family in ("llama", "qwen3"):
        values["attention_bias"] = config.qkv_bias
    if family == "mistral":
        values["sliding_window"] = config.sliding_window
    if family in ("qwen2", "qwen3"):
        windows = [config.window(layer) for layer in range(config.n_layers)]
        values |= {
            "use_sliding_window": config.sliding_window is not None,
            "sliding_window": config.sliding_window,
            "max_window_layers": next((i for i, w in enumerate(windows) if w is not None), config.n_layers),
            "layer_types": [FULL if window is None else SLIDING for window in windows],
        }
    return values


def family_of(config: ModelConfig) -> Family:
    """Returns transformers' model_type for `config`: its own `family`, or the first that fits.

    Raises:
        ConfigError: no family fits, or `config.family` does not.
    """
    every_layer = config.sliding_layers is None or len(config.sliding_layers) == config.n_layers
    no_window, biases = config.sliding_window is None, (config.qkv_bias, config.o_bias)
    fits: dict[Family, bool] = {
        "llama": no_window and not config.qk_norm and biases[0] == biases[1] and config.dim % config.n_heads == 0,
        "mistral": every_layer and not config.qk_norm and biases == (False, False),
        "qwen2": not config.qk_norm and biases == (True, False),
        "qwen3": config.qk_norm and biases[0] == biases[1],
    }
    wanted = get_args(Family) if config.family is None else (config.family,)
    for family in wanted:
        scaling = config.rope_scaling
        original = None if scaling is None else scaling.original_max_position_embeddings
        dynamic = scaling is not None and scaling.rope_type == "dynamic"
        if fits[family] and dynamic and original != config.max_position_embeddings:
            expected, remedy = (
                f"max_position_embeddings={original} with dynamic scaling",
                "transformers keeps one length.",
            )
            raise ConfigError(
                "max_position_embeddings", expected=expected, got=config.max_position_embeddings, remedy=remedy
            )
        if fits[family]:
            return family
    named = ("qk_norm", "qkv_bias", "o_bias", "sliding_window", "sliding_layers", "dim", "n_heads")
    raise ConfigError(
        "family",
        expected=f"a shape that {' or '.join(wanted)} can have",
        got=", ".join(f"{name}={getattr(config, name)}" for name in named),
        remedy="Leave family out for one that fits, or train a shape that transformers has.",
    )
