"""A mixer from outside the package, taken all the way: described, proven, built, decoded, saved, loaded and planned."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import asbuilt
from asbuilt import cost, spec
from asbuilt.cli.main import cli
from asbuilt.errors import InputError
from asbuilt.kernels.memory import Memory, Saved, memory, memory_of
from asbuilt.kernels.memory.registry import MEMORIES
from asbuilt.measure import run
from asbuilt.nn.cache import Cache, StateCache
from asbuilt.nn.linear import Linear, PartModule
from asbuilt.nn.registry import MODULES
from asbuilt.nn.step import Step
from asbuilt.spec.json import OUTSIDE, PARTS


@dataclass(frozen=True, kw_only=True)
class Decay(spec.Part):
    """o(sum over s <= t of decay^(t - s) v(x_s)): a moving sum, which one vector for each sequence remembers."""

    kind = "ssm"
    d_model: int
    decay: float = 0.5

    def holds(self) -> dict[str, spec.Weight]:
        """v and o, (d_model, d_model)."""
        return {f"{name}.weight": spec.Weight(shape=(self.d_model, self.d_model), role="matrix") for name in "vo"}

    def multiplies(self, run: spec.Pass) -> tuple[spec.Product, ...]:
        """Two products, and one of the decays of all pairs."""
        square: dict[str, Any] = {"a": run.rows, "b": self.d_model, "c": self.d_model}
        pairs = spec.Product(name="mix", a=run.tokens, b=run.tokens, c=self.d_model, n=run.batch)
        return (
            spec.Product(name="v", weight="v.weight", **square),
            pairs,
            spec.Product(name="o", weight="o.weight", **square),
        )

    def remembers(self) -> tuple[spec.Remembered, ...]:
        """The sum so far."""
        return (spec.Remembered(name="sum", shape=(self.d_model,), per="sequence"),)


class DecayModule(PartModule):
    """Its module: the past as one vector, the new tokens as one product."""

    v: Linear
    o: Linear

    def __init__(self, part: Decay, path: str) -> None:
        super().__init__(part, path)
        self.decay = part.decay

    def forward(self, x_BTM: Tensor, step: Step) -> Tensor:
        """Returns (B, T, M)."""
        values, n = self.v(x_BTM), step.tokens
        ages = torch.arange(n)[:, None] - torch.arange(n)
        decays = torch.where(ages >= 0, self.decay ** ages.double(), 0.0).to(x_BTM.dtype)
        sums = torch.bmm(decays.expand(len(values), n, n), values)
        if step.cache is not None:
            kept = step.cache.layer(self.path, StateCache)
            (before,) = kept.read()
            sums = sums + before[:, None] * (self.decay ** torch.arange(1, n + 1).double()).to(x_BTM.dtype)[:, None]
            kept.write((sums[:, -1],))
        return self.o(sums)


class DecayMemory(Memory[Decay]):
    """What the module above keeps for the backward pass, and has alive at once."""

    def saves(self, run: spec.Pass) -> tuple[Saved, ...]:
        """Inputs of both maps, and the decays of all pairs, which need no gradient."""
        wide = run.rows * self.part.d_model
        return (
            Saved(name="input", size=wide),
            Saved(name="decays", size=run.tokens**2),
            Saved(name="sums", size=wide),
        )

    def recomputes(self) -> tuple[str, ...]:
        """The decays."""
        return ("decays",)

    def peak_bytes(self, run: spec.Pass) -> int:
        """Ages and powers of all pairs in 8 bytes, once more where chosen; or values, sums and what o makes of them."""
        values, pairs = run.rows * self.part.d_model * run.width, run.tokens**2
        return max(values + 25 * pairs, 3 * values + (8 + run.width) * pairs)


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    asbuilt.register(Decay, DecayModule, DecayMemory)
    yield
    MEMORIES.pop(Decay, None)
    memory_of()(Memory)  # forgets what was found
    for known in (PARTS, OUTSIDE):
        known.pop("Decay", None)
    MODULES.pop(Decay, None)


def mixed() -> spec.Model:
    """Every other block mixes by attention."""
    made = asbuilt.decoder(d_model=32, n_layers=4, n_heads=4, n_vocab=50, max_positions=64, name="mixed")
    made = made.edit("blocks.0.attention", body=Decay(d_model=32, decay=0.75))
    return made.edit("blocks.2.attention", body=Decay(d_model=32))


def test_it_is_described_and_planned() -> None:
    described = asbuilt.describe(mixed(), seq=10)
    row = described.at("blocks.2.attention.body")
    assert (row.part, row.kind, row.parameters) == ("Decay", "ssm", 2 * 32 * 32)
    assert row.flops_per_token == 2 * (2 * 32 * 32) + 2 * 10 * 32
    assert described.parameters["ssm"] == 2 * row.parameters
    assert described.cache["bytes_at_seq"] == 2 * 2 * 32 + 2 * 10 * 2 * 2 * 32
    plan = asbuilt.plan(mixed(), "h100-sxm", context=64)
    assert plan.fits
    assert plan.weight_bytes == 2 * described.parameters["total"]
    assert asbuilt.plan(mixed(), "h100-sxm", task="train").fits


def test_its_declarations_hold_on_the_built_model() -> None:
    """Named parameters, counted FLOPs, and bytes of the cache, as those of our parts."""
    part, built = mixed(), asbuilt.build(mixed())
    assert {n: tuple(p.shape) for n, p in built.named_parameters()} == {n: w.shape for n, w, _ in spec.weights(part)}
    with FlopCounterMode(display=False) as counter:
        built.to("meta")(torch.zeros(2, 10, dtype=torch.long, device="meta"), kernel="reference")
    assert counter.get_total_flops() == cost.flops(part, spec.Pass(tokens=10, batch=2)).forward
    cache = Cache(part, batch=2, capacity=10, dtype=torch.float32)
    assert cache.nbytes == 2 * cost.cache(part, 10, "fp32").at_seq


def test_what_is_said_of_its_memory_is_what_it_keeps_and_needs() -> None:
    """Bytes that autograd keeps, to the byte; the allocator's peak, where pairs or rows are the most."""
    part, built = mixed(), asbuilt.build(mixed())
    bill = cost.saved(part, spec.Pass(tokens=10, batch=2, width=4))
    assert run.saved_bytes(built, tokens=10, batch=2) == (bill.all, bill.loss)
    decays = {f"blocks.{i}.attention.body:decays" for i in (0, 2)}
    assert {key for key in cost.recomputed_tensors(part) if "decays" in key} == decays
    body = part.at("blocks.2.attention.body")
    layer = built.get_submodule("blocks.2.attention.body")
    for batch, tokens in ((1, 300), (200, 20)):
        x = torch.randn(batch, tokens, 32)
        with torch.inference_mode():
            peak = run.peak_bytes(lambda: layer(x, Step((batch, tokens), x.device)))  # noqa: B023  called at once
        assert memory(body).peak_bytes(spec.Pass(tokens=tokens, batch=batch, width=4)) == pytest.approx(peak, abs=8)


def test_decoding_equals_the_whole() -> None:
    built, tokens = asbuilt.build(mixed(), dtype="fp64"), torch.randint(50, (2, 12))
    whole = built(tokens)
    cache = Cache(built.spec, batch=2, capacity=12, dtype=torch.float64)
    pieces = [built(tokens[:, a:b], cache=cache) for a, b in ((0, 5), (5, 6), (6, 7), (7, 12))]
    torch.testing.assert_close(torch.cat(pieces, 1), whole)
    assert asbuilt.generate(built, tokens[0].tolist(), max_new_tokens=1) == [int(whole[0, -1].argmax())]


def test_it_is_saved_and_loaded_and_every_command_takes_it(tmp_path: Path) -> None:
    built = asbuilt.build(mixed())
    asbuilt.save(built, tmp_path / "m")
    assert json.loads((tmp_path / "m" / "asbuilt.json").read_text())["model"]["blocks"][0]["branches"][0]["body"] == {
        "part": "Decay",
        "d_model": 32,
        "decay": 0.75,
    }
    loaded = asbuilt.load(tmp_path / "m")
    assert loaded.spec == mixed()
    assert asbuilt.diff(built, loaded).same
    for words in (("describe",), ("plan", "serve", "--gpu", "h100-sxm")):
        result = CliRunner().invoke(cli, [*words, str(tmp_path / "m"), "--json"])
        assert result.exit_code == 0, result.output
    del PARTS["Decay"]
    with pytest.raises(InputError, match=r"unknown part \(got 'Decay'\)"):
        asbuilt.open_model(tmp_path / "m")


def test_one_without_a_module_is_described_and_not_built() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Bare(Decay):
        pass

    asbuilt.register(Bare)
    made = mixed().edit("blocks.0.attention", body=Bare(d_model=32))
    assert asbuilt.describe(made).at("blocks.0.attention.body").part == "Bare"
    with pytest.raises(
        InputError, match=r"blocks.0.attention.body: no module is registered for this part \(got 'Bare'\)"
    ):
        asbuilt.build(made)
    del PARTS["Bare"], OUTSIDE["Bare"]


def test_a_cell_may_be_run_again() -> None:
    """A notebook defines the class anew: the last one registered is meant."""
    again = dataclass(frozen=True, kw_only=True)(type("Decay", (Decay,), {"__doc__": "Another."}))
    asbuilt.register(again, DecayModule)
    assert PARTS["Decay"] is again
    del MODULES[again]


@dataclass(frozen=True, kw_only=True)
class Attention(spec.Part):
    """Has a name of ours."""

    d_model: int


@dataclass(kw_only=True)
class Loose:
    """Is no part."""

    d_model: int


@dataclass(frozen=True, kw_only=True)
class Odd(spec.Part):
    """Is of a kind that there is not."""

    kind = "mixer"  # type: ignore[assignment]
    d_model: int


@dataclass(frozen=True, kw_only=True)
class Narrow(spec.Part):
    """Says no width."""

    d: int


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (Attention, "the name of a built-in part"),
        (Loose, "must be a dataclass"),
        (Odd, "kind: must be"),
        (Narrow, "has no d_model"),
        (Decay(d_model=3), "must be a dataclass"),
    ],
)
def test_what_is_not_registered(part: Any, said: str) -> None:  # noqa: ANN401
    with pytest.raises(InputError, match=said):
        asbuilt.register(part)


def test_it_stands_only_where_a_body_does() -> None:
    for path, field in (("blocks.0.attention", "norm"), ("", "head")):
        with pytest.raises(InputError, match="wrong part for"):
            mixed().edit(path, **{field: Decay(d_model=32)})
    both = spec.Parallel(attention=Decay(d_model=32), ffn=mixed().at("blocks.0.ffn.body"))  # type: ignore[arg-type]
    assert mixed().edit("blocks.0.attention", body=both).at("blocks.0.attention.body.attention") == Decay(d_model=32)
