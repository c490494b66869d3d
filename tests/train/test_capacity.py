"""A capacity in training: who is dropped, by counting token by token; and the loss of single sequences."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from test_balance import concentrated, router
from test_memorise import experts, learnt, with_body
from torch import Tensor, nn

from asbuilt import InputError, build
from asbuilt.nn.experts import MixtureOfExperts
from asbuilt.nn.experts import Router as Module
from asbuilt.nn.model import Model
from asbuilt.train.experts import Routing, auxiliary_loss, sequence_loss
from asbuilt.train.optimizer import optimizers
from asbuilt.train.recompute import recompute_blocks
from asbuilt.train.settings import Experts, Optimizer
from asbuilt.train.step import train_step


def by_token(module: MixtureOfExperts, x_BTM: Tensor, capacity: int) -> tuple[Tensor, int]:
    """Every sequence, choice rank and token in turn: an expert takes so many, and the rest add nothing."""
    out, dropped = torch.zeros_like(x_BTM), 0
    for b, x_TM in enumerate(x_BTM):
        weights_Tk, chosen_Tk = module.router(x_TM)
        load = dict.fromkeys(range(module.part.n_experts), 0)
        for rank in range(module.part.top_k):
            for t, x_M in enumerate(x_TM):
                e = int(chosen_Tk[t, rank])
                load[e] += 1
                if load[e] > capacity:
                    dropped += 1
                    continue
                gate, up, down = (module.get_parameter(name)[e] for name in ("gate", "up", "down"))
                out[b, t] += weights_Tk[t, rank] * (down @ (nn.functional.silu(gate @ x_M) * (up @ x_M)))
    return out, dropped


def mixtures(model: Model) -> list[MixtureOfExperts]:
    return [one for one in model.modules() if isinstance(one, MixtureOfExperts)]


def test_first_choices_come_first_and_the_others_pass_by() -> None:
    model = build(concentrated(), seed=random.randrange(2**31), dtype=torch.float64)
    factor, tokens = random.choice([0.5, 0.75, 1.0]), random.randint(5, 12)
    routing = Routing(model, Experts(capacity=factor))
    capacity = math.ceil(factor * 2 * tokens / 4)
    seen: list[tuple[MixtureOfExperts, Tensor, Tensor]] = []
    for one in mixtures(model):
        one.register_forward_hook(lambda own, given, out: seen.append((own, given[0], out)))  # pyright: ignore
    with routing:
        model(torch.randint(64, (3, tokens)))
    dropped = 0
    for own, x_BTM, out_BTM in seen:
        expected, count = by_token(own, x_BTM, capacity)
        torch.testing.assert_close(out_BTM, expected, rtol=1e-9, atol=1e-12)
        dropped += count
    assert len(seen) == 2
    assert routing.dropped == pytest.approx(dropped / (2 * 3 * tokens * 2))


def test_tokens_are_dropped_where_gradients_are_and_nowhere_else() -> None:
    model = build(concentrated(), seed=3)
    ids = torch.randint(64, (2, 9))
    plain = model(ids).detach()
    Routing(model, Experts(capacity=0.25))
    with torch.no_grad():
        assert torch.equal(model(ids), plain)
    assert not torch.allclose(model(ids), plain, atol=1e-6)
    Routing(model, Experts())
    assert torch.equal(model(ids), plain)


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_repeated_blocks_drop_the_same(kind: str) -> None:
    found, batch = [], learnt(concentrated())
    for each in ("none", kind):
        model = build(concentrated(), seed=3)
        recompute_blocks(model, each)  # type: ignore[arg-type]
        made = optimizers(model, Optimizer(lr=0.0, weight_decay=0.0))
        stepped = train_step(model, [batch], made, experts=Experts(capacity=0.5, sequence=0.1))
        assert stepped.dropped is not None
        assert 0 < stepped.dropped < 1
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_the_sequence_loss_is_the_mean_over_the_sequences() -> None:
    one, sequences, tokens = router(4, 2), random.randint(2, 5), random.randint(3, 9)
    logits = torch.randn(sequences * tokens, 4)
    chosen = logits.topk(2, -1).indices
    parts = [slice(i * tokens, (i + 1) * tokens) for i in range(sequences)]
    expected = sum(float(auxiliary_loss(one, logits[at], chosen[at])) for at in parts) / sequences
    assert float(sequence_loss(one, logits, chosen, sequences)) == pytest.approx(expected, rel=1e-6)
    # balanced over the batch, and every sequence has one expert of its own: 1 for the batch, 4 for the sequences
    apart = torch.full((8, 4), -30.0)
    for i in range(8):
        apart[i, i // 2] = 30.0
    top = apart.topk(1, -1).indices
    assert float(auxiliary_loss(one, apart, top)) == pytest.approx(1.0, rel=1e-5)
    assert float(sequence_loss(one, apart, top, 4)) == pytest.approx(4.0, rel=1e-5)


def test_logits_and_choices_come_out() -> None:
    model = build(concentrated(), seed=5)
    routing = Routing(model, Experts(auxiliary=0.1))
    with routing:
        model(torch.randint(64, (2, 7)))
    assert [one for one, _, _ in routing.choices] == [one for one in model.modules() if isinstance(one, Module)]
    for one, logits_NE, chosen_Nk in routing.choices:
        assert logits_NE.shape == (14, 4)
        assert torch.equal((logits_NE.softmax(-1) + one.correction).topk(2, -1).indices, chosen_Nk)


def test_a_capacity_of_weighted_inputs_is_refused() -> None:
    body = replace(experts(), weighs="inputs")
    with pytest.raises(InputError, match=r"experts\.capacity"):
        Routing(build(with_body(concentrated(), "ffn", body)), Experts(capacity=1.0))
