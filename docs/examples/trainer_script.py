"""Long-context training with a Lightning Trainer of one's own, without the command line.

python docs/examples/trainer_script.py --devices 4 --context-length 65536
"""

import argparse

import lightning.pytorch as pl

from ringflash.train import (
    LanguageModel,
    LastCheckpoint,
    ModelConfig,
    OptimizerConfig,
    RingAttentionStrategy,
    TextDataModule,
    Throughput,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    options = {"corpus": "stdlib", "cache_dir": "~/.cache/ringflash", "run_dir": "runs/script", "devices": 2}
    for name, default in (options | {"context_length": 4096, "dim": 512, "steps": 100}).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    args = parser.parse_args()

    model = LanguageModel(
        ModelConfig(257, args.dim, 4, args.dim // 64, max(args.dim // 256, 1), 3 * args.dim),  # 256 bytes and an end
        OptimizerConfig(lr=1e-3, warmup_steps=args.steps // 10, max_steps=args.steps),
        activation_checkpointing="block",
    )
    data = TextDataModule(args.corpus, args.context_length, documents="joined", cache_dir=args.cache_dir)
    trainer = pl.Trainer(
        strategy=RingAttentionStrategy(),  # all devices share each sequence; with data_parallel_size=2 half of them do
        devices=args.devices,
        max_steps=args.steps,
        max_epochs=-1,
        gradient_clip_val=1.0,
        limit_val_batches=0,
        use_distributed_sampler=False,  # the data module's own knows which ranks share a sequence
        default_root_dir=args.run_dir,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[LastCheckpoint(every_n_steps=args.steps), Throughput()],
    )
    trainer.fit(model, data)
    if trainer.is_global_zero:
        print(f"loss {trainer.callback_metrics['train/loss'].item():.4f} after {trainer.global_step} steps", flush=True)


if __name__ == "__main__":  # the Trainer starts this file once more for each further device
    main()
