"""Built models read the batches: decoder, masked encoder, encoder-decoder; padding changes no output with a loss."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from asbuilt.families import read_config
from asbuilt.nn import build
from asbuilt.nn.model import Model
from asbuilt.text.sources import Piece
from asbuilt.text.train import train
from asbuilt.train.batch import IGNORED, Batch
from asbuilt.train.data import shard_data
from asbuilt.train.objectives import Masked, NextToken, Objective, Prefix, SpanCorruption
from asbuilt.train.shards import Shards, write_shards

N_VOCAB, PAD, MASK, END = 280, 257, 258, 256
SENTINELS = tuple(range(260, 280))
SMALL: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 40,
        "max_position_embeddings": 64,
    },
    "bert": {
        "architectures": ["BertForMaskedLM"],
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 40,
        "max_position_embeddings": 64,
    },
    "t5": {"d_model": 32, "num_layers": 2, "num_heads": 4, "d_kv": 8, "d_ff": 40},
}
READ: list[tuple[str, Objective, str]] = [
    ("llama", NextToken(context=24), "stream"),
    ("llama", NextToken(context=24, separate=True), "documents"),
    ("llama", Prefix(context=24), "stream"),
    ("bert", Masked(context=24, mask_id=MASK, n_vocab=256, rate=0.5), "stream"),
    ("bert", Masked(context=24, mask_id=MASK, n_vocab=256, rate=0.5), "documents"),
    ("t5", SpanCorruption(length=24, sentinels=SENTINELS, end_id=END, start_id=PAD, density=0.4), "stream"),
    ("t5", Prefix(context=24, start_id=PAD, pad_id=PAD), "stream"),
]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    made = ["".join(random.choices("abcdefgh", k=random.randint(3, 20))) for _ in range(40)]
    folder = tmp_path_factory.mktemp("read") / "s"
    return write_shards(folder, (Piece(text, True) for text in made), [train([], 256)], end_id=END)


def small(family: str) -> Model:
    spec = read_config({"model_type": family, "vocab_size": N_VOCAB} | SMALL[family], family).spec
    return build(spec, seed=random.randrange(2**31))


def read(model: Model, batch: Batch) -> torch.Tensor:
    return model(batch.ids, **batch.inputs)


@pytest.mark.parametrize(("family", "objective", "packing"), READ, ids=repr)
def test_models_read_batches(family: str, objective: Objective, packing: Any, shards: Shards) -> None:  # noqa: ANN401
    """One row for each target, gradients in every weight, and other numbers in padding change nothing."""
    model = small(family)
    data = shard_data(shards, objective, batch_size=4, seed=3, packing=packing, pad_id=PAD)
    batch = data.batch(random.randrange(1000))
    logits = read(model, batch)
    assert logits.shape == (*batch.targets.shape, N_VOCAB)
    cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED).backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in model.parameters())
    padding = {"ids": batch.valid, "source": batch.source_valid}
    changed = {
        name: torch.where(valid, getattr(batch, name), torch.randint_like(getattr(batch, name), 256))
        for name, valid in padding.items()
        if valid is not None
    }
    kept = {name: value for name, value in vars(batch).items() if name != "counted"}
    again = read(model, Batch(**(kept | changed)))
    learned = batch.targets != IGNORED
    assert torch.allclose(again[learned], logits[learned], atol=1e-5)
