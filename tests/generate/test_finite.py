"""NaN and infinite numbers end a generation or an embedding with a message, at the step at which they come."""

from __future__ import annotations

import math

import pytest
import torch
from strategies import scripted

from asbuilt.errors import InputError
from asbuilt.generate.decode import generate
from asbuilt.generate.embed import embed_ids
from asbuilt.generate.finite import require_logits
from asbuilt.generate.pooling import Pooling
from asbuilt.generate.sampling import Sampling
from asbuilt.nn import build
from asbuilt.nn.model import Model
from asbuilt.spec import MLP, Block, Branch, TextEncoder, TokenEmbedding


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=1)])
def test_the_step_and_the_weight_are_named(bad: float, sampling: Sampling) -> None:
    """The model says 1, 2, 3 ... after positions 0, 1, 2 ...; what it adds at position 4 is no number."""
    model = scripted([1, 2, 3, 4, 5, 6, 7], 8)
    with torch.no_grad():
        model.get_parameter("positions.weight")[4] = bad
    steps, said = generate(model, [[0, 0]], max_new_tokens=5, sampling=sampling), []
    with pytest.raises(InputError, match=r"logits: .*after 5 tokens: positions\.weight has .*corrupt") as caught:
        said.extend(steps)
    assert len(said) == 3
    assert caught.value.field == "logits"


def test_the_row_is_named_where_there_are_several() -> None:
    model = scripted([1, 2, 3], 4)
    for row in (0, 1):
        logits = torch.zeros(2, 4)
        logits[row, 3] = math.nan
        with pytest.raises(InputError, match=f"after {5 + row} tokens of prompt {row}"):
            require_logits(logits, model, (5, 6))


@pytest.mark.parametrize("bad", [[math.nan] * 4, [0.0, math.nan, 0.0, 0.0], [0.0, math.inf, 0.0, 0.0], [-math.inf] * 4])
def test_what_is_no_choice(bad: list[float]) -> None:
    with pytest.raises(InputError, match="not finite"):
        require_logits(torch.tensor([[0.0] * 4, bad]), scripted([1], 4), (1, 1))


def test_tokens_that_are_never_chosen_may_be_minus_infinite() -> None:
    require_logits(torch.tensor([[-math.inf, 0.0, -math.inf, -3.0]]), scripted([1], 4), (1,))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_dtype_that_overflows_is_the_likely_cause(dtype: torch.dtype) -> None:
    """16 * 300^2 is beyond float16's 65,504; float32 takes more to leave."""
    model = scripted([1, 2, 3], 4).to(dtype)
    with torch.no_grad():
        large = 300 if dtype == torch.float16 else 1e30
        model.get_parameter("head.weight").fill_(large)
        model.get_parameter("positions.weight").fill_(large)
    fix = "compute in float32" if dtype == torch.float16 else "config.json"
    with pytest.raises(InputError, match=rf"{str(dtype)[6:]} overflowed.*{fix}"):
        list(generate(model, [[0]], max_new_tokens=1))


def encoder() -> Model:
    ffn = Branch(name="ffn", body=MLP(d_model=3, d_ff=2, activation="relu"))
    spec = TextEncoder(
        embedding=TokenEmbedding(n_vocab=9, d_model=3), blocks=(Block(branches=(ffn,)),), max_positions=8
    )
    return build(spec)


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_vectors_name_their_sentence(bad: float) -> None:
    model = encoder()
    assert bool(embed_ids(model, [[1, 2], [3]], Pooling()).isfinite().all())
    with torch.no_grad():
        model.get_parameter("embedding.weight")[7, 1] = bad
    embed_ids(model, [[1, 2], [3]], Pooling())
    with pytest.raises(InputError, match=r"vectors: .*of sentence 2: embedding\.weight has"):
        embed_ids(model, [[1, 2, 3], [7], [4, 5]], Pooling(steps=()))
