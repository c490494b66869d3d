"""Low-rank adapters: the model with them is the model whose matrices have them added up, and starts as without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import strategies
import torch
from hypothesis import given
from hypothesis import strategies as st

from asbuilt.errors import InputError
from asbuilt.kernels.memory import memory
from asbuilt.kernels.memory.linear import LoraMemory
from asbuilt.nn import build, stored_tensors
from asbuilt.nn.cache import Cache
from asbuilt.nn.linear import Lora as Module
from asbuilt.nn.linear import of_map
from asbuilt.spec import (
    MLP,
    Attention,
    Block,
    Branch,
    Linear,
    Lora,
    MixtureOfExperts,
    Model,
    Part,
    Pass,
    Router,
    TiedHead,
    TokenEmbedding,
    dumps,
    loads,
    walk,
)
from asbuilt.spec.adapters import adapted, without_adapters
from asbuilt.spec.part import weights


def without(spec: Model) -> Model:
    """The model without adapters."""
    return without_adapters(spec)


@given(strategies.adapted(), strategies.SEEDS, st.integers(1, 3), st.integers(1, 9))
@torch.no_grad()
def test_adapters_are_what_they_add_up_to(spec: Model, seed: int, batch: int, tokens: int) -> None:
    """In a whole pass, and where the last token comes after cached ones (latents are then absorbed)."""
    model = strategies.randomised(spec, seed)
    plain = build(without(spec), dtype=torch.float64, seed=None)
    merged = {path: m for path, m in model.named_modules() if isinstance(m, Module)}
    held = stored_tensors(model)
    stacks = {f"{path}.{name}": m for path, part in walk(spec) for name, m in getattr(part, "stacks", {}).items()}
    for path, parameter in stored_tensors(plain).items():
        owner = path.removesuffix(".weight")
        parameter.copy_(merged[owner].matrix(torch.float64) if owner in merged and path != owner else held[path])
        if isinstance(around := stacks.get(path), Lora):
            parameter.add_(held[f"{path}_lora_b"] @ held[f"{path}_lora_a"], alpha=around.alpha / around.rank)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(spec.n_vocab, (batch, tokens), generator=generator)
    source = {"source_BS": ids} if "source" in spec.reads else {}
    wanted = plain(ids, **source)
    torch.testing.assert_close(model(ids, **source), wanted, rtol=1e-9, atol=1e-9 * max(1.0, float(wanted.abs().max())))
    stepped = spec.decodes and spec.gives != "labels"  # blocks without a mixer may be an encoder's
    if not stepped or tokens == 1 or any(getattr(p, "depends_on_length", False) for _, p in walk(spec)):
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
    beside = {path.removesuffix("lora_a") for path, _, _ in weights(spec) if path.endswith("lora_a")}
    assert {path for path, weight, _ in weights(spec) if weight.frozen} == {
        path
        for path, _, _ in weights(without(spec))
        if path.removesuffix("weight").removesuffix("bias") in beside  # of a map
        or f"{path}_" in beside  # of a stack
        or (path.endswith("_bias") and path.removesuffix("bias") in beside)
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


def test_an_attention_with_adapters_is_divided_with_them() -> None:
    """Two devices, four heads of 3: half of the rows of q, v and their B, half of the columns of o and its A."""
    plain = Attention(d_model=8, n_heads=4, n_kv_heads=2, d_head=3)
    own = {name: Lora(base=plain.plain_maps()[name], rank=2, alpha=2.0) for name in "qvo"}
    part = replace(plain, **own).shard(2)
    assert part == replace(plain.shard(2), q=part.q, v=part.v, o=part.o)
    assert {path: weight.shape for path, weight, _ in weights(part)} == {
        "q.weight": (6, 8),
        "q.lora_a": (2, 8),
        "q.lora_b": (6, 2),
        "k.weight": (3, 8),
        "v.weight": (3, 8),
        "v.lora_a": (2, 8),
        "v.lora_b": (3, 2),
        "o.weight": (8, 6),
        "o.lora_a": (2, 6),
        "o.lora_b": (8, 2),
    }


def test_the_adapter_is_multiplied_by_alpha_over_rank() -> None:
    """W + (6 / 2) B A, number by number (section 4.1 of the paper)."""
    part = Lora(base=Linear(d_in=2, d_out=1, bias=True), rank=1, alpha=6.0)
    module = of_map(replace(part, base=replace(part.base, d_out=2), rank=2))
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        module.get_parameter("bias").copy_(torch.tensor([0.5, -0.5]))
        module.get_parameter("lora_a").copy_(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
        module.get_parameter("lora_b").copy_(torch.tensor([[1.0, 0.0], [2.0, 1.0]]))
        # A x = (1 + 2 * 10, 10) = (21, 10); B A x = (21, 2 * 21 + 10) = (21, 52); times 3: (63, 156)
        assert module(torch.tensor([[1.0, 10.0]])).tolist() == [[1 + 63 + 0.5, 10 + 156 - 0.5]]
        assert module.matrix(torch.float32).tolist() == [[1 + 3 * 1.0, 3 * 2.0], [3 * 2.0, 1 + 3 * 5.0]]


def test_room_beside_the_plain_map() -> None:
    """x A^T (3 numbers a row), B of it and that scaled (7 each), of 5 rows in 4 bytes; the widest map decides."""
    run = Pass(tokens=5, width=4)
    one = Lora(base=Linear(d_in=4, d_out=7), rank=3, alpha=1.0)
    assert LoraMemory(one).peak_beside(run, run.rows) == 5 * (3 + 14) * 4
    plain = MLP(d_model=4, d_ff=7, activation="silu")
    wrapped = {name: Lora(base=base, rank=3, alpha=1.0) for name, base in plain.plain_maps().items()}
    assert memory(replace(plain, **wrapped)).peak_bytes(run) - memory(plain).peak_bytes(run) == 5 * (3 + 14) * 4


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Attention(d_model=8, n_heads=2, n_kv_heads=2, d_head=4, q=5), "Attention.q"),  # type: ignore[arg-type]  # pyright: ignore
        (lambda: Attention(d_model=8, n_heads=2, n_kv_heads=2, d_head=4, k=Linear(d_in=8, d_out=8)), "Attention.k"),
        (lambda: TokenEmbedding(n_vocab=4, d_model=4, project=Linear(d_in=2, d_out=4)), "TokenEmbedding.project"),
        (lambda: MLP(d_model=4, d_ff=7, activation="relu", up=Linear(d_in=4, d_out=6)), "MLP.up"),
        (lambda: Lora(base=Lora(base=Linear(d_in=4, d_out=4), rank=1, alpha=1.0), rank=1, alpha=1.0), "Lora.base"),  # type: ignore[arg-type]  # pyright: ignore
        (lambda: Lora(base=Linear(d_in=4, d_out=3), rank=5, alpha=1.0), "Lora.rank"),
        (lambda: Lora(base=Linear(d_in=4, d_out=3), rank=2, alpha=0.0), "Lora.alpha"),
    ],
)
def test_what_cannot_stand_there_is_refused_by_name(make: Callable[[], Part], field: str) -> None:
    with pytest.raises(InputError) as refused:
        make()
    assert refused.value.field == field


def test_every_expert_has_an_adapter_of_its_own() -> None:
    """Expert e gives x (W_e + (alpha / rank) B_e A_e)^T, in training and in inference; shapes by hand."""
    router = Router(d_model=4, n_experts=3, top_k=2)
    plain = MixtureOfExperts(d_model=4, d_ff=6, n_experts=3, activation="silu", router=router, bias=True)
    part = adapted(one_block(plain), rank=2, alpha=3.0, targets=("up", "down")).blocks[0].branches[0].body
    assert isinstance(part, MixtureOfExperts)
    shapes = {name: weight.shape for name, weight in part.holds().items() if "lora" in name}
    assert shapes == {
        "up_lora_a": (3, 2, 4),
        "up_lora_b": (3, 6, 2),
        "down_lora_a": (3, 2, 6),
        "down_lora_b": (3, 4, 2),
    }
    frozen = {name for name, weight in part.holds().items() if weight.frozen}
    assert frozen == {"up", "up_bias", "down", "down_bias"}
    assert part.shard(2) == replace(plain.shard(2), up=part.shard(2).stacks["up"], down=part.shard(2).stacks["down"])
    assert {n: w.shape for n, w in part.shard(2).holds().items() if "lora" in n} == {
        "up_lora_a": (3, 2, 4),
        "up_lora_b": (3, 3, 2),
        "down_lora_a": (3, 2, 3),
        "down_lora_b": (3, 4, 2),
    }
    assert part.spreads().keys() == part.holds().keys()
    # 5 rows, two experts each: x A^T and that times B^T, up and down
    added = sum(p.flops for p in part.multiplies(Pass(tokens=5))) - sum(
        p.flops for p in plain.multiplies(Pass(tokens=5))
    )
    assert added == 2 * 10 * 2 * (4 + 6) * 2


def one_block(body: Part) -> Model:
    """A model of one block with this one branch."""
    block = Block(branches=(Branch(name="ffn", body=body),))  # type: ignore[arg-type]  # pyright: ignore
    return Model(
        embedding=TokenEmbedding(n_vocab=5, d_model=4),
        blocks=(block,),
        head=TiedHead(d_model=4, n_vocab=5),
        max_positions=8,
    )


def test_targets_are_names_of_maps() -> None:
    attention = Attention(d_model=4, n_heads=2, n_kv_heads=1, d_head=2)
    spec = one_block(attention)
    chosen = adapted(spec, 1, 2.0, ("q", "v")).blocks[0].branches[0].body
    assert [name for name, m in chosen.maps.items() if isinstance(m, Lora)] == ["q", "v"]  # type: ignore[attr-defined]  # pyright: ignore
    assert without_adapters(adapted(spec, 1, 2.0)) == spec
    with pytest.raises(InputError, match="qq") as refused:
        adapted(spec, 1, 2.0, ("qq",))
    assert refused.value.field == "targets"
    with pytest.raises(InputError, match="already"):
        adapted(adapted(spec, 1, 2.0), 1, 2.0)
