from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringflash.errors import ConfigError
from ringflash.train.callbacks.loss_by_position import LossByPosition, buckets, table_by_position
from ringflash.train.lightning.batch import positions_of


@given(st.integers(0, 2**31), st.integers(1, 3), st.integers(1, 40), st.booleans())
@settings(max_examples=30, deadline=None)
def test_table_against_a_loop(seed: int, batch: int, seqlen: int, shared: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (seqlen,) if shared else (batch, seqlen)
    positions = (2 ** (20 * torch.rand(shape, generator=generator, dtype=torch.float64))).long()
    labels = torch.randint(0, 5, (batch, seqlen), generator=generator)
    labels[torch.rand(batch, seqlen, generator=generator) < 0.3] = -100
    losses = torch.rand(batch, seqlen, generator=generator)
    losses[labels == -100] = torch.nan  # losses without a label must not count
    expected: dict[str, tuple[int, float]] = {}
    for row in range(batch):
        for column in range(seqlen):
            if labels[row, column] != -100:
                position = int(positions.expand(batch, -1)[row, column])
                end = 64
                while end <= position:
                    end *= 2
                name = f"{end // 2 if end > 64 else 0}-{end - 1}"
                tokens, total = expected.get(name, (0, 0.0))
                expected[name] = tokens + 1, total + losses[row, column].item()
    cut = seqlen // 2
    parts = slice(0, cut), slice(cut, seqlen)
    tables = [table_by_position(losses[:, part], labels[:, part], positions[..., part]) for part in parts]
    found = {bucket.name: (bucket.tokens, bucket.loss_sum) for bucket in buckets(tables[0] + tables[1])}
    assert found.keys() == expected.keys()
    for name, (tokens, total) in expected.items():
        assert found[name] == (tokens, pytest.approx(total, rel=1e-12))


def test_edges_of_buckets() -> None:
    positions = torch.tensor([0, 63, 64, 127, 128, 2**29, 2**30, 2**40])
    table = table_by_position(torch.ones(1, 8), torch.zeros(1, 8, dtype=torch.int64), positions)
    names = [bucket.name for bucket in buckets(table)]
    assert names == ["0-63", "64-127", "128-255", f"{2**29}-{2**30 - 1}", f"{2**30}-{2**31 - 1}"]
    assert [bucket.tokens for bucket in buckets(table)] == [2, 2, 1, 1, 2]
    assert buckets(table)[0].perplexity == pytest.approx(2.718281828)


def test_positions_of_a_batch_that_no_strategy_has_cut() -> None:
    labels = torch.zeros(2, 6, dtype=torch.int64)
    assert positions_of({"labels": labels}).tolist() == [0, 1, 2, 3, 4, 5]
    packed = {"labels": labels, "cu_seqlens": torch.tensor([[0, 2, 6], [0, 6, 6]])}
    assert positions_of(packed).tolist() == [[0, 1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]]


def test_means_since_the_last_logged_step() -> None:
    logged: list[dict[str, float]] = []
    trainer: Any = SimpleNamespace(global_step=0, log_every_n_steps=2, strategy=None)
    module: Any = SimpleNamespace(log_dict=lambda metrics, **_: logged.append(metrics))
    callback = LossByPosition()
    callback.on_train_start(trainer, module)
    labels = torch.zeros(1, 65, dtype=torch.int64)
    for loss, stepped in ((1.0, 0), (3.0, 1), (5.0, 1), (8.0, 1), (2.0, 1)):
        trainer.global_step += stepped
        outputs = {"token_losses": torch.full((1, 65), loss)}
        callback.on_train_batch_end(trainer, module, outputs, {"labels": labels}, 0)
    names = ["train/loss_by_position/0-63", "train/loss_by_position/64-127"]
    assert logged == [dict.fromkeys(names, 3.0), dict.fromkeys(names, 5.0)]
    with pytest.raises(ConfigError, match="returns no token losses"):
        callback.on_train_batch_end(trainer, module, {"loss": torch.ones(())}, {"labels": labels}, 0)
