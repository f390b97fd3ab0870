"""Training on packed conversations equals the plain formula on each conversation alone."""

from __future__ import annotations

import pytest
import torch

from ringflash.train.models.decoder import Decoder
from tests.train.conftest import Worlds
from tests.train.conversations import LENGTH, conversations, plain_loss, run_of
from tests.train.lightning.test_equivalence import assert_gradients


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_and_losses_count_learnt_tokens_only(worlds: Worlds, world_size: int) -> None:
    data, outcome = conversations(worlds.folder / "chats"), worlds[world_size]["conversations"]
    counts = data.train_samples().num_labels(range(len(data.train_samples())))
    assert int(data.tokens.lengths().max()) <= LENGTH
    assert 2 < len({*counts.tolist()}) <= len(counts) < len(data.tokens.lengths()) / 2  # unequal, and packed
    with torch.device("meta"):
        decoder = Decoder(run_of(data).model, seed=5).double()
    decoder.materialise("cpu")
    loss = plain_loss(decoder, data, held_out=False)
    loss.backward()
    assert outcome.logged["train/loss"] == [pytest.approx(loss.item(), rel=1e-12)]
    gradients = {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}
    assert_gradients(outcome, gradients, 1e-12)
    decoder.load_state_dict(outcome.weights)
    with torch.no_grad():
        expected = plain_loss(decoder, data, held_out=True).item()
    assert outcome.logged["val/loss"][-1] == pytest.approx(expected, rel=1e-12)
