"""Documents of one row: each is computed as if it were alone, forward and backward, or the model is refused by name."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import specs
from test_corpus import recipe
from torch import Tensor

from asbuilt import InputError, build, spec
from asbuilt.families import read_config
from asbuilt.nn.step import within
from asbuilt.spec.documents import require_separable
from asbuilt.train import loop
from asbuilt.train.batch import IGNORED, Batch
from asbuilt.train.loss import loss_of
from asbuilt.train.settings import Data

MODELS = {
    "gpt2": {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 32},
    "llama": {
        "num_hidden_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 32,
    },
    "mistral": {
        "num_hidden_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 32,
        "sliding_window": 3,
    },
    "bloom": {"n_layer": 2, "hidden_size": 16, "n_head": 4},
    "bert": {
        "architectures": ["BertForMaskedLM"],
        "num_hidden_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 32,
    },
}


def rows(B: int, T: int, *, padded: bool) -> Tensor:
    """Documents of random lengths, numbered as shards do; with padding at some rows' ends."""
    made = torch.zeros(B, T, dtype=torch.int64)
    for row in made:
        at, number = 0, random.randrange(9)
        while at < T:
            n = random.randint(1, 6)
            row[at : at + n] = number
            at, number = at + n, number + 1
        if padded and random.random() < 0.7:
            row[T - random.randint(1, 3) :] = -1
    return made


def pieces(documents_BT: Tensor) -> list[tuple[int, int, int]]:
    """Row, first token and end of every document."""
    found = []
    for b, row in enumerate(documents_BT.tolist()):
        start = 0
        for t in range(1, len(row) + 1):
            if t == len(row) or row[t] != row[start]:
                found += [(b, start, t)] if row[start] >= 0 else []
                start = t
    return found


def drawn(name: str) -> spec.Model:
    return read_config({"model_type": name, "vocab_size": 40} | MODELS[name], "config").spec


def randomised(model: spec.Model) -> torch.nn.Module:
    built = build(model, seed=random.randrange(2**31)).double()
    with torch.no_grad():
        for one in built.parameters():
            one += 0.2 * torch.randn_like(one)
    return built


def require_alone(built: torch.nn.Module, ids_BT: Tensor, documents_BT: Tensor) -> None:
    valid = None if bool((documents_BT >= 0).all()) else documents_BT >= 0
    made = built(ids_BT, documents_BT=documents_BT, valid_BT=valid)
    for b, start, stop in pieces(documents_BT):
        alone = built(ids_BT[b : b + 1, start:stop])
        torch.testing.assert_close(made[b : b + 1, start:stop], alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("padded", [False, True])
def test_each_document_is_computed_as_alone(name: str, padded: bool) -> None:
    built, ids = randomised(drawn(name)), torch.randint(40, (3, 17))
    documents = rows(3, 17, padded=padded)
    require_alone(built, ids, documents)
    valid = None if not padded else documents >= 0
    apart, joined = built(ids, documents_BT=documents, valid_BT=valid), built(ids, valid_BT=valid)
    assert (apart - joined).abs().max() > 1e-3  # without it they are not


@settings(max_examples=40)
@given(model=specs(), data=st.data())
def test_every_model_keeps_documents_apart_or_is_refused(model: spec.Model, data: st.DataObject) -> None:
    T = min(11, model.max_positions)
    assume(T > 3)
    built, ids, documents = randomised(model), torch.randint(model.n_vocab, (2, T)), rows(2, T, padded=False)
    try:
        require_separable(model)
    except InputError:
        with pytest.raises(InputError, match="documents of one row"):
            built(ids, documents_BT=documents)
        return
    require_alone(built, ids, documents)


def summed(built: torch.nn.Module, batch: Batch) -> Tensor:
    loss = loss_of(built, batch)  # type: ignore[arg-type]
    loss.total.backward()
    return loss.nats


def test_the_gradient_is_that_of_the_documents_alone_in_float32() -> None:
    model = build(drawn("llama"), seed=random.randrange(2**31))
    ids, documents = torch.randint(40, (3, 18)), rows(3, 18, padded=False)
    targets = ids[:, 1:].masked_fill(documents[:, 1:] != documents[:, :-1], IGNORED)
    packed = Batch(ids=ids[:, :-1], targets=targets, documents=documents[:, :-1])
    nats = summed(model, packed)
    grads = {path: one.grad for path, one in model.named_parameters()}
    model.zero_grad()
    model = model.train()
    alone = [
        summed(model, Batch(ids=ids[b : b + 1, i : j - 1], targets=ids[b : b + 1, i + 1 : j]))
        for b, i, j in pieces(documents)
        if j - i > 1
    ]
    assert float(nats) == pytest.approx(float(torch.stack(alone).sum()), rel=1e-5)
    for path, one in model.named_parameters():
        torch.testing.assert_close(one.grad, grads[path], rtol=1e-4, atol=1e-5)


def test_positions_begin_at_each_document() -> None:
    assert within(torch.tensor([[3, 3, 4, 4, 4, 7], [1, 2, 2, 2, -1, -1]])).tolist() == [
        [0, 1, 0, 1, 2, 0],
        [0, 0, 1, 2, 0, 1],
    ]


@pytest.mark.parametrize("packing", ["stream", "documents"])
@pytest.mark.parametrize("objective", ["next", "masked"])
def test_a_run_has_the_mask_and_the_same_targets(tmp_path: Path, packing: str, objective: str) -> None:
    changes = (f"data.packing={packing}",)
    plain = loop.prepare(recipe(tmp_path, objective, "plain", *changes))
    masked = loop.prepare(recipe(tmp_path, objective, "masked", *changes, "data.document_mask=true"))
    for step in range(4):
        one, other = plain.data.batch(step), masked.data.batch(step)
        assert torch.equal(one.ids, other.ids)
        assert torch.equal(one.targets, other.targets)
        assert one.documents is None
        assert other.documents is not None
        assert torch.equal(other.documents, masked.data.documents(step)[:, : other.ids.shape[1]])  # type: ignore[attr-defined]
    batch = masked.data.batch(0)
    wanted = float(loss_of(masked.model, batch).nats) / batch.tokens
    assert masked.step().loss == pytest.approx(wanted, abs=1e-6)


def test_what_has_no_documents_is_refused() -> None:
    with pytest.raises(InputError, match=r"data\.document_mask"):
        Data(text="x", document_mask=True, objective="prefix")
    with pytest.raises(InputError, match="has no effect on rows of one document"):
        Data(text="x", document_mask=True, packing="single")
    mamba = read_config({"model_type": "mamba", "hidden_size": 16, "num_hidden_layers": 1}, "config").spec
    with pytest.raises(InputError, match=r"Mamba\): its state, or window, passes"):
        require_separable(mamba)
