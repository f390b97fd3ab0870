"""Arguments of the commands that train: their help, those of `auto`, and configurations by name."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ringflash.commands.options import CONFIGS, config_file
from ringflash.train.commands.class_paths import is_inline

AUTO = "  auto                          fit for what this machine has: all GPUs, or two processes on its CPU\n"
HELP = """usage: ringflash {name} SUBCOMMAND [--config FILE ...] [--KEY=VALUE ...]

Trains over a ring of all processes, and tests what was trained.

{auto}  fit --config FILE             train; FILE is a path, or the name of a configuration of the package
  validate, test --config FILE  the loss of a checkpoint (--ckpt_path)

  --trainer.devices=4           processes of this host; under torchrun those that it started
  --ckpt_path last              resume from the newest checkpoint of the run, or begin
  --print_config                print the whole configuration, and run nothing
  --debug                       show tracebacks

Later arguments change earlier ones. `ringflash {name} fit --help` lists every key."""


def help_text(name: str) -> str:
    """Returns the help of the command `name`, without the list of keys."""
    return HELP.format(name=name, auto=AUTO if name == "train" else "")


def auto_arguments() -> list[str]:
    """Returns the arguments of `ringflash train auto`: all GPUs of this machine, or two processes on its CPU."""
    gpus = torch.cuda.device_count()
    name = "tiny-cpu" if gpus == 0 else "h200-1" if gpus == 1 else "h200-4"
    return ["fit", "--config", str(CONFIGS / f"{name}.yaml"), *([f"--trainer.devices={gpus}"] if gpus else [])]


def with_config_files(args: Sequence[str]) -> list[str]:
    """Returns the arguments with the path of each configuration; configurations given inline stay as they are.

    Raises:
        ConfigError: a configuration that does not exist, with the nearest name.
    """
    found, is_next = list[str](), False
    for arg in args:
        option, equals, value = arg.partition("=")
        if is_next and not is_inline(arg):
            found.append(str(config_file(arg)))
        elif option == "--config" and equals and not is_inline(value):
            found.append(f"--config={config_file(value)}")
        else:
            found.append(arg)
        is_next = arg in ("--config", "-c")
    return found
