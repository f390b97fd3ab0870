"""Ring attention in the Trainer of transformers, and in loops that accelerate runs."""

from ringflash.train import accelerate_private

accelerate_private.check_versions()  # here, before a submodule imports names that an older release lacks
