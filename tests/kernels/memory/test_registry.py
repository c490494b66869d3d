"""What parts say of memory is found by their type, or by the one they are made from; and what the smallest say."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from small_parts import ATTENTION, BODY, EXPERTS, LATENT

from asbuilt.kernels.memory import Memory, Saved, memory, memory_of
from asbuilt.kernels.memory.attention import AttentionMemory
from asbuilt.kernels.memory.registry import MEMORIES
from asbuilt.spec import MLP, Alibi, Attention, Block, Branch, ClampedGate, GatedMLP, LayerNorm, Parallel, Part, Pass
from asbuilt.spec.json import PARTS

RUN = Pass(tokens=7, batch=3, past=4)
BRANCH = Branch(name="ffn", body=BODY)


class Own(Attention):
    """One of another's, made from ours."""


class Nothing(Part):
    """Says nothing."""

    d_model: int = 3


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = dict(MEMORIES)
    yield
    for part in MEMORIES.keys() - before.keys():
        del MEMORIES[part]
    memory_of()(Memory)  # forgets what was found


def test_nothing_is_said_unless_it_is() -> None:
    for part in (Part(), Nothing(), Alibi(n_heads=2)):
        found = memory(part)
        assert found.part is part
        assert type(found) is Memory
        assert (found.saves(RUN), found.recomputes(), found.same_input(), found.peak_bytes(RUN)) == ((), (), (), 0)
        assert found.mask_peak(RUN) is None


def test_a_part_made_from_ours_is_computed_like_it_until_it_says_otherwise() -> None:
    part = Own(d_model=11, n_heads=6, n_kv_heads=2, d_head=5)
    assert memory(part).saves(RUN) == memory(ATTENTION).saves(RUN) != ()
    assert type(memory(part)) is AttentionMemory

    @memory_of(Own)
    class Half(AttentionMemory):
        def peak_bytes(self, run: Pass) -> int:
            return super().peak_bytes(run) // 2

    assert memory(part).peak_bytes(RUN) == memory(ATTENTION).peak_bytes(RUN) // 2 > 0
    assert memory(part).saves(RUN) == memory(ATTENTION).saves(RUN)


def test_what_is_registered_after_it_was_asked_for_is_meant() -> None:
    assert memory(Nothing()).peak_bytes(RUN) == 0

    class Rows(Memory[Nothing]):
        def peak_bytes(self, run: Pass) -> int:
            return run.rows * self.part.d_model

    assert memory_of(Nothing)(Rows) is Rows
    assert memory(Nothing()).peak_bytes(RUN) == 63


def test_a_file_is_imported_when_a_part_of_it_is_asked_for() -> None:
    """And none of them imports torch: each part of ours, in a process of its own."""
    script = """
import sys
from asbuilt.kernels.memory import memory
from asbuilt.spec import MLP
from asbuilt.spec.json import PARTS
from asbuilt.kernels.memory.registry import registered
memory(MLP(d_model=4, d_ff=8, activation="relu")).recomputes()
print(sorted(name.rpartition(".")[2] for name in sys.modules if name.startswith("asbuilt.kernels.memory.")))
print(len({registered(part) for part in PARTS.values()}) > 20, "torch" in sys.modules)
"""
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert said == "['feedforward', 'linear', 'registry']\nTrue False\n"
    assert PARTS


def test_what_is_kept_takes() -> None:
    tensor = Saved(name="x", size=5)
    for width, sizes in (
        ("activation", (10, 20, 40)),
        ("wide", (20, 20, 40)),
        ("int64", (40,) * 3),
        ("bool", (5,) * 3),
    ):
        of_width = replace(tensor, width=width)  # type: ignore[arg-type]
        assert tuple(of_width.nbytes(n) for n in (2, 4, 8)) == sizes


def test_what_reads_one_tensor() -> None:
    norm = LayerNorm(d=11)
    both = Branch(name="both", body=Parallel(attention=ATTENTION, ffn=BODY))
    beside = replace(BRANCH, name="beside", parallel=True)
    for first, reader in (
        (BRANCH, "ffn.body"),
        (replace(BRANCH, norm=norm), "ffn.norm"),
        (both, "both.body.attention"),
        (replace(both, norm=norm), "both.norm"),
    ):
        assert memory(Block(branches=(first, beside))).same_input() == (("beside.body", reader),)
    assert memory(both.body).same_input() == (("ffn", "attention"),)
    assert memory(Block(branches=(both, BRANCH))).same_input() == ()
    last = replace(beside, norm=norm)
    assert memory(Block(branches=(both, BRANCH, last))).same_input() == (("beside.norm", "ffn.body"),)
    assert memory(EXPERTS).same_input() == (("router", ""), ("shared", ""))
    assert memory(replace(both, norm=norm)).recomputes() == ("body.attention:input",)
    assert memory(replace(BRANCH, norm=norm)).recomputes() == ("body:input",)
    assert memory(BRANCH).recomputes() == memory(both).recomputes() == ()


def test_what_can_be_made_again_of_feed_forwards() -> None:
    for relu in (True, False):
        kind: Any = "relu" if relu else "gelu"
        assert memory(MLP(d_model=4, d_ff=8, activation=kind)).recomputes() == (() if relu else ("hidden",))
        gated = memory(GatedMLP(d_model=4, d_ff=8, activation=kind))
        assert gated.recomputes() == (("hidden",) if relu else ("activated", "hidden"))
        own = replace(EXPERTS, activation=kind)
        assert memory(own).recomputes() == ("rows", *(("hidden",) if relu else ("activated", "hidden")))
        assert memory(replace(own, gating="none")).recomputes() == ("rows", *(() if relu else ("hidden",)))
    clamped = replace(EXPERTS, gating=ClampedGate(alpha=1.0, limit=1.0))
    assert memory(clamped).recomputes() == ("rows", "gate cut", "up cut", "opened", "hidden")
    assert memory(ATTENTION).recomputes() == ("mask", "capped", "probabilities", "probabilities cast")
    assert memory(LATENT).recomputes() == ("mask", "probabilities", "probabilities cast")
