"""Mixed precision: products in bfloat16, weights, gradients and optimizer state in float32."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from test_memorise import WIDTH, experts, with_body
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from asbuilt import build, decoder
from asbuilt.families import gpt2
from asbuilt.spec import Model
from asbuilt.train.batch import Batch
from asbuilt.train.optimizer import optimizers
from asbuilt.train.recompute import recompute_blocks
from asbuilt.train.settings import CHECKPOINTING, Checkpointing, Optimizer
from asbuilt.train.step import evaluate, train_step

SIZES: dict[str, Any] = {"d_model": WIDTH, "n_layers": 2, "n_heads": 2, "n_vocab": 61}
SPECS: dict[str, Model] = {
    "gpt2": gpt2.build(**SIZES, max_positions=32),
    "llama": decoder(**SIZES),
    "experts": with_body(decoder(**SIZES), "ffn", experts()),
}


class Dtypes(TorchDispatchMode):
    """The dtypes that matrix products run in."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        if func.overloadpacket.__name__ in ("mm", "addmm", "bmm"):
            self.seen.add(args[-1].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", SPECS)
def test_products_are_in_bfloat16_and_what_is_trained_is_not(name: str) -> None:
    kind: Checkpointing = random.choice(CHECKPOINTING)
    ids = torch.randint(61, (4, 16))
    batch = Batch(ids=ids, targets=ids.roll(-1, 1))
    losses: dict[torch.dtype | None, list[float]] = {}
    seed = random.randrange(2**31)
    for dtype in (None, torch.bfloat16):
        model = build(SPECS[name], seed=seed)
        recompute_blocks(model, kind)
        made = optimizers(model, Optimizer(lr=3e-3))
        with Dtypes() as products:
            first = train_step(model, [batch], made, autocast=dtype)
        assert (torch.bfloat16 in products.seen) == (dtype is not None), kind
        more = [train_step(model, [batch], made, autocast=dtype).loss for _ in range(15)]
        losses[dtype] = [first.loss, *more, evaluate(model, [batch], autocast=dtype)]
        held: list[Tensor] = [x for p in model.parameters() for x in (p, p.grad) if x is not None]
        held += [x for o, _ in made.made for each in o.state.values() for x in each.values()]
        assert {x.dtype for x in held} == {torch.float32}
    exact, rounded = losses[None], losses[torch.bfloat16]
    assert rounded[0] == pytest.approx(exact[0], rel=0.01)
    assert rounded[-1] == pytest.approx(exact[-1], rel=0.05)
    assert rounded[-1] < 0.9 * rounded[0]
