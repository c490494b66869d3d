"""Choosing keys: scores as defined, the largest with a rule for equal ones, and shared choices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import SEEDS, randomised

from asbuilt import cost
from asbuilt.errors import InputError
from asbuilt.kernels.indexer import index_scores, largest, places, reference_scores
from asbuilt.nn.cache import Cache
from asbuilt.spec import (
    Block,
    Branch,
    Head,
    Indexer,
    LatentAttention,
    Model,
    Pass,
    Rotary,
    SharedChoice,
    TokenEmbedding,
)
from asbuilt.spec.indexer import QUERIES

INDEXER = Indexer(d_model=12, q_rank=6, n_heads=3, d_head=8, top_k=4, positions=Rotary(d_rotary=8, theta=10.0))
LATENT = LatentAttention(d_model=12, n_heads=2, q_rank=6, kv_rank=5, d_nope=4, d_rope=2, d_value=3)


def model_of(*choosers: Indexer | SharedChoice | None) -> Model:
    blocks = tuple(
        Block(branches=(Branch(name="attention", body=LATENT.resized(indexer=chooser)),)) for chooser in choosers
    )
    head = Head(d_model=12, n_vocab=7)
    return Model(embedding=TokenEmbedding(n_vocab=7, d_model=12), blocks=blocks, head=head, max_positions=64)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("tokens", [1, QUERIES - 1, QUERIES, QUERIES + 1, 5 * QUERIES])
def test_scores_are_those_of_the_definition(tokens: int, dtype: torch.dtype, tolerance: float) -> None:
    q, k, weight = (torch.randn(2, tokens, *width, dtype=dtype) for width in ((3, 8), (8,), (3,)))
    want = reference_scores(q, k, weight)
    torch.testing.assert_close(
        index_scores(q, k, weight), want, rtol=tolerance, atol=tolerance * float(want.abs().max())
    )


@given(SEEDS, st.integers(1, 12), st.integers(1, 12))
def test_the_largest_are_those_of_a_stable_sort(seed: int, keys: int, top_k: int) -> None:
    """Few values, so that many are equal; some keys are not past."""
    scores = torch.randint(-2, 3, (2, 5, keys), generator=torch.Generator().manual_seed(seed)).float()
    scores = scores.masked_fill(scores == -2, -torch.inf)
    order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
    want = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order, True) & (scores > -torch.inf)
    chosen = largest(scores, top_k)
    assert torch.equal(chosen, want)
    index, there = places(chosen, top_k)
    assert torch.equal(torch.zeros_like(chosen).scatter(-1, index, there), chosen)


def test_only_chosen_keys_change_an_answer() -> None:
    """The last token of a text of 12 attends to 4 keys: to zero the latents of others in the cache changes nothing."""
    spec = model_of(INDEXER)
    model, ids = randomised(spec, 0), torch.randint(0, 7, (1, 12), generator=torch.Generator().manual_seed(3))
    kept = Cache(spec, batch=1, capacity=12, dtype=torch.float64)
    model(ids[:, :-1], cache=kept)
    latents = kept.layers["blocks.0.attention.body"].tensors[0]
    answers = []
    for place in range(11):
        again = Cache(spec, batch=1, capacity=12, dtype=torch.float64)
        model(ids[:, :-1], cache=again)
        again.layers["blocks.0.attention.body"].tensors[0][:, :, place] = 0
        answers.append(model(ids[:, -1:], cache=again))
    whole = model(ids)[:, -1:]
    changed = [not torch.allclose(answer, whole, atol=1e-12) for answer in answers]
    assert latents.shape == (1, 1, 12, 7)
    assert 3 <= sum(changed) <= 4  # the token may have chosen itself


@pytest.mark.parametrize("choosers", [(SharedChoice(top_k=4),), (INDEXER, SharedChoice(top_k=5))])
def test_a_shared_choice_needs_one_to_share(choosers: tuple[Any, ...]) -> None:
    with pytest.raises(InputError, match="chooses"):
        model_of(*choosers)


def test_a_shared_choice_is_the_last_one() -> None:
    """Layers that share hold no indexer and cache no index keys, and cost no index scores."""
    one, two = model_of(INDEXER), model_of(INDEXER, SharedChoice(top_k=4))
    dense = model_of(None)
    run = Pass(tokens=1, past=99)
    added = cost.total_parameters(two) - cost.total_parameters(one)
    assert added == cost.total_parameters(dense) - 2 * 7 * 12
    index_keys = cost.cache(one, 1, "fp8").per_token - cost.cache(dense, 1, "fp8").per_token
    assert (index_keys, cost.cache(two, 1, "fp8").per_token) == (8, 8 + 2 * 7)
    scores = cost.flops(two, run).scores - cost.flops(one, run).scores
    assert scores == 2 * 2 * 4 * (7 + 5)  # 2 heads, 4 keys, as wide as latent and RoPE key, and as the latent


BAD: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 0},
    "positions": {"positions": Rotary(d_rotary=10)},
}


@pytest.mark.parametrize("field", BAD)
def test_what_cannot_be(field: str) -> None:
    with pytest.raises(InputError, match=rf"\.{field}\b"):
        replace(INDEXER, **BAD[field])
