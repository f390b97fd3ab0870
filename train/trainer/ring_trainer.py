"""RingTrainer: transformers' Trainer with ring attention over its processes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from ringflash.errors import ConfigError
from ringflash.train.trainer.rings import LIGHTNING, AcceleratorRing

ORDINARY = "Leave it out, or use transformers' Trainer, which trains without a ring."
METRICS = "Use the evaluation's loss. For metrics of logits, save the model and evaluate it with transformers' Trainer."


class RingTrainer(Trainer):
    """Trainer of transformers for causal language models, with each sequence cut over a ring of processes.

    Start it with torchrun or `accelerate launch`. Losses, gradients, their norm and the evaluation's loss are those of
    Trainer on as many processes as there are rings. A batch's labels are shifted before the cut; padding is allowed at
    the end of sequences, and documents may be packed with position_ids. `per_device_train_batch_size` is the number of
    rows of a ring.

    Args:
        args: positional arguments of Trainer.
        context_parallel_size: as in `AcceleratorRing`.
        layout: as in `AcceleratorRing`.
        transport: as in `AcceleratorRing`.
        keywords: keyword arguments of Trainer.

    Raises:
        ConfigError: an argument or setting of Trainer that cannot be honoured on a ring; or as in `AcceleratorRing`.
        ArgumentError: the model cannot run on a ring; see `ringflash.hf.check_model`.
    """

    loss_is_scaled_for_ga = True

    def __init__(
        self,
        *args: Any,
        context_parallel_size: int | None = None,
        layout: str = "zigzag",
        transport: str = "auto",
        **keywords: Any,
    ) -> None:
        self._ring_options = {"layout": layout, "transport": transport}
        self._asked_size = context_parallel_size
        super().__init__(*args, **keywords)
        self.model_accepts_loss_kwargs = True  # earlier releases divide the loss by the accumulation otherwise
        for name in ("compute_metrics", "preprocess_logits_for_metrics", "compute_loss_func"):
            if getattr(self, name) is not None:
                remedy = ORDINARY if name == "compute_loss_func" else METRICS
                expected = "None, since each rank has the logits of its shard alone"
                raise ConfigError(name, expected=expected, got="a function", remedy=remedy)
        if self.model_init is None:
            self.ring.use_ring_attention(self.model)

    def create_accelerator_and_postprocess(self) -> None:
        """Creates the accelerator and the rings of its processes. Raises as the class."""
        check_settings(self.args)
        super().create_accelerator_and_postprocess()
        self.ring = AcceleratorRing(self.accelerator, self._asked_size, **self._ring_options, seed=self.args.seed)

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Returns a new model, with ring attention."""
        model = super().call_model_init(trial)
        self.ring.use_ring_attention(model)
        return model

    def get_cp_size(self) -> int:
        """Returns the number of ranks that share a sequence, by which Trainer counts its batches."""
        return self.ring.ring_size

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | int | None]:
        """Returns the batches until the next step of the optimizer, and the number of labels in those of all rings."""
        batches = list(islice(epoch_iterator, num_batches))
        self.ring.restart_dropout(self.state.global_step * self.args.gradient_accumulation_steps)
        return batches, self.ring.count_valid_tokens(batches)

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Returns the loss of a batch, with the gradient that DDP must average; a collective.

        Raises:
            ConfigError: outputs are asked for.
            ArgumentError: as in `AcceleratorRing.token_mean`.
        """
        if return_outputs:
            raise ConfigError("return_outputs", expected="False", got=True, remedy=METRICS)
        return self.ring.token_mean(model, inputs, num_valid_tokens=num_items_in_batch).loss

    def evaluation_loop(self, *args: Any, **keywords: Any) -> Any:
        """Evaluates as Trainer does, and weighs batches by their rows: the ranks of a ring count them once."""
        self.gather_function = self._losses_of_rows
        return super().evaluation_loop(*args, **keywords)

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Returns the loss of a batch over the valid tokens of all rings, without logits and labels.

        Raises:
            ConfigError: logits are asked for.
            ArgumentError: as in `AcceleratorRing.token_mean`.
        """
        if not prediction_loss_only:
            raise ConfigError("prediction_loss_only", expected="True on a ring", got=False, remedy=METRICS)
        with torch.no_grad(), self.compute_loss_context_manager():
            return self.ring.token_mean(model, inputs).value, None, None

    def _losses_of_rows(self, losses: Tensor) -> Tensor:
        """Returns the loss of each row that all rings hold, from the equal losses of one ring's rows."""
        losses, state = losses.repeat(self.ring.num_rings), self.accelerator.gradient_state
        is_cut = state.end_of_dataloader and state.remainder > 0
        return losses[: state.remainder] if is_cut else losses

    def floating_point_ops(self, inputs: Any) -> int:
        """Returns the operations of this rank: its part of those of whole sequences."""
        return super().floating_point_ops(inputs) // self.ring.ring_size


def check_settings(args: TrainingArguments) -> None:
    """Raises ConfigError for the first setting of Trainer that cannot be honoured on a ring."""
    config: Any = args.accelerator_config
    refused: dict[str, tuple[object, str, str]] = {
        "n_gpu": (args.n_gpu > 1 and args.n_gpu, "1", "Start one process a GPU: torchrun --nproc-per-node=..."),
        "deepspeed": (args.deepspeed, "None", LIGHTNING),
        "fsdp": (args.fsdp, "none", LIGHTNING),
        "parallelism_config": (args.parallelism_config, "None", "Pass context_parallel_size to RingTrainer instead."),
        "torch_compile": (args.torch_compile, "False", "Leave it out."),
        "label_smoothing_factor": (args.label_smoothing_factor, "0", ORDINARY),
        "neftune_noise_alpha": (args.neftune_noise_alpha, "None: its scale depends on the length", ORDINARY),
        "auto_find_batch_size": (args.auto_find_batch_size, "False", "Set per_device_train_batch_size."),
        "average_tokens_across_devices": (
            not args.average_tokens_across_devices and "False",
            "True, the default",
            "Leave it out: ranks of a ring have unequal numbers of labels.",
        ),
        "train_sampling_strategy": (
            args.train_sampling_strategy == "batch_rebalance" and "batch_rebalance",
            '"random", "sequential" or "group_by_length"',
            "Choose one of these: batch_rebalance deals rows out to processes, not to rings.",
        ),
        "include_num_input_tokens_seen": (
            args.include_num_input_tokens_seen not in ("no", False) and args.include_num_input_tokens_seen,
            '"no"',
            "Leave it out: Trainer would count the tokens of a sequence once a rank.",
        ),
        "include_for_metrics": (args.include_for_metrics, "none", METRICS),
        "predict_with_generate": (getattr(args, "predict_with_generate", False), "False", METRICS),
        "dispatch_batches": (config.dispatch_batches, "None or False", "Each rank reads the rows of its ring."),
    }
    for name, (got, expected, remedy) in refused.items():
        if got:
            raise ConfigError(name, expected=expected, got=got, remedy=remedy)
