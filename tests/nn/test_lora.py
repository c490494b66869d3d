"""Low-rank adapters: the model with them is the model whose matrices have them added up, and starts as without."""

from __future__ import annotations

import strategies
import torch
from hypothesis import given
from hypothesis import strategies as st

from asbuilt.nn import build, stored_tensors
from asbuilt.nn.cache import Cache
from asbuilt.nn.linear import Lora as Module
from asbuilt.spec import Linear, Lora, Model, dumps, loads, walk
from asbuilt.spec.part import weights


def without(spec: Model) -> Model:
    """The model without adapters."""
    if not any(isinstance(part, Lora) for _, part in walk(spec)):
        return spec
    return spec.replace_where(Lora, lambda part: part.base)  # type: ignore[attr-defined]  # pyright: ignore


@given(strategies.adapted(), strategies.SEEDS, st.integers(1, 3), st.integers(1, 9))
@torch.no_grad()
def test_adapters_are_what_they_add_up_to(spec: Model, seed: int, batch: int, tokens: int) -> None:
    """In a whole pass, and where the last token comes after cached ones (latents are then absorbed)."""
    model = strategies.randomised(spec, seed)
    plain = build(without(spec), dtype=torch.float64, seed=None)
    merged = {path: m for path, m in model.named_modules() if isinstance(m, Module)}
    held = stored_tensors(model)
    for path, parameter in stored_tensors(plain).items():
        owner = path.removesuffix(".weight")
        parameter.copy_(merged[owner].matrix() if owner in merged and path != owner else held[path])
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(spec.n_vocab, (batch, tokens), generator=generator)
    source = {} if spec.encoder is None else {"source_BS": ids}
    wanted = plain(ids, **source)
    torch.testing.assert_close(model(ids, **source), wanted, rtol=1e-9, atol=1e-9 * max(1.0, float(wanted.abs().max())))
    if not spec.decodes or tokens == 1 or any(getattr(p, "depends_on_length", False) for _, p in walk(spec)):
        return
    cache = Cache(spec, batch=batch, capacity=tokens, dtype=torch.float64)
    model(ids[:, :-1], cache=cache, **source)
    last = model(ids[:, -1:], cache=cache)
    torch.testing.assert_close(last, wanted[:, -1:], rtol=1e-9, atol=1e-9 * max(1.0, float(wanted.abs().max())))


@given(strategies.adapted(), strategies.SEEDS)
def test_adapters_start_at_nothing_and_alone_are_trained(spec: Model, seed: int) -> None:
    model, plain = build(spec, seed=seed), build(without(spec), seed=seed)
    for path, weight, _ in weights(spec):
        parameter = model.get_parameter(path)
        assert parameter.requires_grad == (weight.learned and not weight.frozen)
        if path.endswith("lora_b"):
            assert not parameter.any()
    adapted = {path for path, part in walk(spec) if isinstance(part, Lora)}
    assert {path for path, weight, _ in weights(spec) if weight.frozen} == {
        path for path, _, _ in weights(without(spec)) if path.rpartition(".")[0] in adapted
    }
    assert {path for path, _ in plain.named_parameters()} <= {path for path, _ in model.named_parameters()}


@given(strategies.adapted())
def test_adapters_in_json_and_taken_away(spec: Model) -> None:
    assert loads(dumps(spec)) == spec
    bare = without(spec)
    assert not any(isinstance(part, Lora) for _, part in walk(bare))
    assert {path for path, part in walk(spec) if isinstance(part, Lora)} <= {
        path for path, part in walk(bare) if isinstance(part, Linear)
    }


def test_a_device_has_its_part_of_an_adapter() -> None:
    """Rows of B with the rows of the map, columns of A with its columns; the other factor is whole."""
    out = Lora(base=Linear(d_in=6, d_out=8, split="out"), rank=2, alpha=2.0).shard(2)
    shapes = {name: weight.shape for name, weight in out.holds().items()}
    assert shapes == {"weight": (4, 6), "lora_a": (2, 6), "lora_b": (4, 2)}
    inward = Lora(base=Linear(d_in=6, d_out=8, bias=True, split="in"), rank=2, alpha=2.0).shard(2)
    shapes = {name: weight.shape for name, weight in inward.holds().items()}
    assert shapes == {"weight": (8, 3), "bias": (8,), "lora_a": (2, 3), "lora_b": (8, 2)}
