"""Activation checkpointing: the same gradients, the declared bytes kept, and only what may be repeated is repeated."""

from __future__ import annotations

import random
from typing import Any

import pytest
import strategies
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import SEEDS
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from asbuilt import build, cost, decoder
from asbuilt.families import gpt2
from asbuilt.nn.model import Model
from asbuilt.spec import LanguageModel, Pass
from asbuilt.train.batch import Batch
from asbuilt.train.loss import headless, loss_of
from asbuilt.train.recompute import recompute_blocks
from asbuilt.train.settings import CHECKPOINTING, Checkpointing

SIZES = {"d_model": 64, "n_layers": 4, "n_heads": 4, "n_vocab": 61, "max_positions": 96}
SPECS = {
    "llama": decoder(**SIZES, n_kv_heads=2),  # type: ignore[arg-type]
    "gpt2": gpt2.build(**SIZES),  # type: ignore[arg-type]
}


class Watch(TorchDispatchMode):
    """Every storage that is made, and how many matrix products run."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.own = {one.untyped_storage()._cdata for one in (*model.parameters(), *model.buffers())}
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        out = func(*args, **(kwargs or {}))
        self.products += func.overloadpacket.__name__ in ("mm", "addmm", "bmm")
        for one in tree_leaves(out):
            if isinstance(one, Tensor):
                storage = one.untyped_storage()
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def alive(self) -> int:
        live = {key: nbytes for key, (storage, nbytes) in self.made.items() if not storage.expired()}
        return sum(nbytes for key, nbytes in live.items() if key not in self.own)


def drawn(spec: LanguageModel, tokens: int) -> Batch:
    ids, targets = (torch.randint(spec.n_vocab, (3, tokens)) for _ in range(2))
    return Batch(ids=ids, targets=targets)


@pytest.mark.parametrize("name", SPECS)
def test_gradients_are_the_same_bit_by_bit(name: str) -> None:
    spec, batch = SPECS[name], drawn(SPECS[name], random.randint(5, 96))
    found: dict[str, list[Tensor]] = {}
    held = len(list(build(spec).parameters()))
    products: dict[str, int] = {}
    for kind in CHECKPOINTING:
        model = build(spec, seed=3)
        recompute_blocks(model, "full")  # a later call replaces it
        recompute_blocks(model, kind)
        loss_of(model, batch).total.backward()  # a first pass counts the products
        model.zero_grad(set_to_none=True)
        with Watch(model) as seen:
            loss_of(model, batch).total.backward()
        found[kind] = [p.grad for p in model.parameters() if p.grad is not None]
        products[kind] = seen.products
    for kind in CHECKPOINTING[1:]:
        assert len(found[kind]) == len(found["none"]) == held
        assert all(torch.equal(a, b) for a, b in zip(found[kind], found["none"], strict=True))
    assert products["selective"] == products["none"] < products["full"]


@given(strategies.specs(), st.sampled_from(CHECKPOINTING[1:]), SEEDS)
@settings(max_examples=12)
def test_any_model_has_the_same_gradients(spec: LanguageModel, kind: Checkpointing, seed: int) -> None:
    torch.manual_seed(seed)
    batch, found = drawn(spec, 5), []
    for each in ("none", kind):
        model = strategies.randomised(spec, seed, torch.float64)
        recompute_blocks(model, each)
        loss_of(model, batch).total.backward()
        found.append({path: p.grad for path, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for path, gradient in found[0].items():
        torch.testing.assert_close(found[1][path], gradient, rtol=1e-9, atol=1e-12, msg=path)


@pytest.mark.parametrize("kind", CHECKPOINTING)
@pytest.mark.parametrize("name", SPECS)
def test_what_stays_allocated_is_what_the_plan_says(name: str, kind: Checkpointing) -> None:
    """Within 3% of the declared bytes, after the forward pass."""
    spec, batch = SPECS[name], drawn(SPECS[name], 96)
    model = build(spec, seed=0)
    recompute_blocks(model, kind)
    with headless(model):
        model(batch.ids)
        with Watch(model) as seen:
            x_BTM = model(batch.ids)
    declared = cost.saved(spec, Pass(tokens=96, batch=3, width=4))
    said = {"none": declared.all, "selective": declared.selective, "full": declared.checkpointed}[kind]
    held = seen.alive() + batch.ids.nbytes
    assert x_BTM.requires_grad  # and is alive: the head saves it
    assert held == pytest.approx(said, rel=0.03), (held, said)
