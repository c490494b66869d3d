"""One row times a matrix gives the same whichever way is found to be faster, and training never takes another way."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import strategies
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from asbuilt.kernels import rows
from asbuilt.nn.cache import Cache
from asbuilt.spec import Model

SIZES = st.integers(1, 40)


@pytest.fixture(params=[True, False], autouse=True)
def _by_pieces(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "pieces_are_faster", lambda threads: request.param)
        yield


@given(SIZES, SIZES, st.integers(1, 3), st.booleans(), st.booleans())
def test_linear_is_the_product(inside: int, outside: int, n: int, biased: bool, placed: bool) -> None:
    x, weight = torch.randn(n, inside), torch.randn(outside, inside)
    bias = torch.randn(outside) if biased else None
    want = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    with torch.inference_mode():
        out = torch.full((n, outside), torch.nan) if placed else None
        have = rows.linear(x, weight, bias, out)
        assert out is None or torch.equal(out, have)
        if not placed:
            assert torch.equal(rows.linear(x[None], weight, bias), have[None])
    torch.testing.assert_close(have, want.float(), rtol=1e-4, atol=1e-4)


def test_training_gives_gradients_to_the_matrix() -> None:
    weight = torch.randn(8, 4, requires_grad=True)
    rows.linear(torch.randn(1, 4), weight).sum().backward()
    assert weight.grad is not None


@given(strategies.specs(max_blocks=2), strategies.SEEDS)
@settings(max_examples=15)
def test_a_decoded_token_is_that_of_the_whole_pass(spec: Model, seed: int) -> None:
    model = strategies.randomised(spec, seed, torch.float32, std=0.2)
    tokens = torch.arange(6)[None] % spec.n_vocab
    with torch.inference_mode():
        whole = model(tokens)
        cache = Cache(spec, batch=1, capacity=6, dtype=torch.float32)
        model(tokens[:, :5], cache=cache)
        torch.testing.assert_close(model(tokens[:, 5:], cache=cache), whole[:, 5:], rtol=1e-3, atol=1e-3)
