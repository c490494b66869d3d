"""What a model is computed in: the dtype that is faster for the request here, unless told, or memory forbids."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from asbuilt import cost
from asbuilt.generate.compute import choose, request_bytes
from asbuilt.kernels import speed as speeds
from asbuilt.kernels.memory import memory
from asbuilt.kernels.speed import Speed
from asbuilt.nn.cache import Cache
from asbuilt.spec import (
    MLP,
    Attention,
    Block,
    Branch,
    CrossAttention,
    Head,
    LanguageModel,
    Model,
    Pass,
    TextEncoder,
    TokenEmbedding,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Microseconds a token where bf16 is emulated, though decoding reads half the bytes, and where the processor has it.
EMULATES = {FP32: Speed(1.0, 10.0), BF16: Speed(6.0, 8.0), FP16: Speed(20.0, 30.0)}
HAS_IT = {FP32: Speed(1.0, 10.0), BF16: Speed(0.5, 5.0), FP16: Speed(0.9, 9.0)}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[torch.dtype, Speed], int | None], None]:
    def be(table: dict[torch.dtype, Speed], free: int | None = None) -> None:
        monkeypatch.setattr(speeds, "speeds", lambda dtypes: tuple(table[d] for d in dtypes))
        monkeypatch.setattr("asbuilt.memory.free", lambda: free)
        monkeypatch.setattr(speeds, "has_instructions", lambda dtype: True)

    return be


def needs(dtype: torch.dtype) -> int:
    return 8_000_000_000 * dtype.itemsize


Machine = Callable[..., None]


def test_a_long_prompt_is_read_in_float32_where_bf16_is_emulated(machine: Machine) -> None:
    """1000 tokens in and 10 out: 6,080 beside 1,100 microseconds, 5.5 times."""
    machine(EMULATES)
    found = choose(BF16, None, 1000, 10, needs)
    assert found.dtype == FP32
    assert found.why == "float32 is 5.5 times as fast as bfloat16 on this CPU"
    assert found.needed == 32_000_000_000
    assert found.warning == (
        "stored in bfloat16, computing in float32, which is 5.5 times as fast as bfloat16 on this CPU"
    )


def test_a_short_prompt_and_a_long_answer_stay_narrow_there(machine: Machine) -> None:
    """10 in and 1000 out: 8,060 beside 10,010. At 400 in and 1000 out: 10,400 beside 10,400, no reason to change."""
    machine(EMULATES)
    for prompt in (10, 400):
        found = choose(BF16, None, prompt, 1000, needs)
        assert (found.dtype, found.why, found.warning) == (BF16, "as stored", "")


def test_a_little_faster_is_not_worth_twice_the_memory(machine: Machine) -> None:
    for wide, want in ((0.81, BF16), (0.79, FP32)):
        machine({BF16: Speed(1.0, 1.0), FP32: Speed(wide, wide)})
        assert choose(BF16, None, 5, 5, needs).dtype == want


def test_without_instructions_a_little_slower_is_too_slow(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    for wide, has, want in ((0.81, False, FP32), (1.01, False, BF16), (0.81, None, BF16), (0.81, True, BF16)):
        machine({BF16: Speed(1.0, 1.0), FP32: Speed(wide, wide)})
        monkeypatch.setattr(speeds, "has_instructions", lambda dtype, has=has: has)
        assert choose(BF16, None, 5, 5, needs).dtype == want


def test_a_choice_is_said(machine: Machine) -> None:
    machine(HAS_IT)
    assert (
        choose(BF16, None, 1000, 0, needs).choice
        == "computing in bfloat16 as stored, 2.0 times as fast as float32 on this CPU"
    )
    assert choose(FP32, BF16, 1000, 0, needs).choice == ""
    assert choose(FP32, None, 1000, 0, needs).choice == ""
    machine({BF16: Speed(1.0, 1.0), FP32: Speed(0.9, 0.9)})
    assert choose(BF16, None, 1000, 0, needs).choice == "computing in bfloat16 as stored, in half the memory"


@pytest.mark.parametrize(
    ("text", "bf16", "fp16"),
    [
        ("processor: 0\nflags\t\t: fpu avx2 avx512f\n", False, False),
        ("processor: 0\nflags\t\t: fpu avx512_bf16\n", True, False),
        ("processor: 0\nFeatures\t: asimd asimdhp i8mm bf16\n", True, True),
        ("processor: 0\n", None, None),
    ],
)
def test_instructions_of_a_processor(
    text: str, bf16: bool | None, fp16: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(text)
    monkeypatch.setattr(speeds, "CPUINFO", file)
    asked = speeds.has_instructions.__wrapped__
    assert (asked(BF16), asked(FP16)) == (bf16, fp16)
    file.unlink()
    assert asked(BF16) is None


def test_what_was_asked_for_is_obeyed_with_the_ratio(machine: Machine) -> None:
    machine(EMULATES)
    found = choose(FP32, BF16, 1000, 10, needs)
    assert (found.dtype, found.why) == (BF16, "as requested")
    assert found.warning == "bfloat16 as requested, although float32 is 5.5 times as fast as bfloat16 on this CPU"
    assert choose(BF16, FP32, 1000, 10, needs).warning == ""
    assert choose(BF16, torch.float64, 1000, 10, needs).dtype == torch.float64
    machine(HAS_IT)
    assert choose(FP32, BF16, 1000, 10, needs).warning == ""


@pytest.mark.parametrize("stored", [BF16, FP16])
def test_a_processor_that_has_it_computes_as_stored(machine: Machine, stored: torch.dtype) -> None:
    machine(HAS_IT)
    found = choose(stored, None, 1000, 10, needs)
    assert (found.dtype, found.why, found.warning, found.needed) == (stored, "as stored", "", 16_000_000_000)


def test_float32_that_does_not_fit_is_not_taken(machine: Machine) -> None:
    """32 GB in float32."""
    machine(EMULATES, 32_000_000_000)
    assert choose(BF16, None, 1000, 10, needs).dtype == FP32
    machine(EMULATES, 31_999_999_999)
    found = choose(BF16, None, 1000, 10, needs)
    assert (found.dtype, found.why) == (BF16, "as stored")
    assert "5.5 times" in found.warning
    assert "needs 32.00 GB" in found.warning


def test_wide_dtypes_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speeds, "speeds", lambda dtypes: pytest.fail("tried"))
    assert choose(FP32, None, 9, 9, needs).dtype == FP32


def test_speeds_are_the_shortest_of_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that products move: one of n rows takes (n + 3) bytes of a number, the first of a kind ten times that."""
    now, rows = [0.0], []

    def product(x: torch.Tensor, weight: torch.Tensor) -> None:
        assert weight.dtype == x.dtype
        rows.append((len(x), x.dtype))
        busy = 10 if rows.count(rows[-1]) in (1, 3) else 1  # the first warms up, and at the third something else runs
        now[0] += busy * (len(x) + 3) * x.dtype.itemsize

    monkeypatch.setattr(speeds, "linear", product)
    monkeypatch.setattr(speeds, "perf_counter", lambda: now[0])
    found = speeds.speeds.__wrapped__((BF16, FP32))
    assert found == (Speed(prefill=2 * 35 / 32, decode=8.0), Speed(prefill=4 * 35 / 32, decode=16.0))
    assert rows[:4] == [(32, BF16), (1, BF16), (32, FP32), (1, FP32)]
    assert rows == rows[:4] * (len(rows) // 4)
    assert found[0].seconds(640, 5) == 640 * 2 * 35 / 32 + 40


def spec(encoder: bool = False) -> Model:
    body = Attention(d_model=8, n_heads=2, n_kv_heads=1, d_head=4)
    branches = [Branch(name="attention", body=body)]
    if encoder:
        branches.append(Branch(name="cross", body=CrossAttention(d_model=8, d_source=8, n_heads=2, d_head=4)))
    branches.append(Branch(name="ffn", body=MLP(d_model=8, d_ff=16, activation="relu")))
    reads = TextEncoder(
        embedding=TokenEmbedding(n_vocab=9, d_model=8),
        max_positions=40,
        blocks=(Block(branches=(Branch(name="ffn", body=branches[-1].body),)),),
    )
    spec = LanguageModel(
        embedding=TokenEmbedding(n_vocab=9, d_model=8),
        blocks=(Block(branches=tuple(branches[:1] + branches[-1:])),) * 2,
        head=Head(d_model=8, n_vocab=9),
        max_positions=40,
    )
    return spec.changed(encoder=reads, blocks=(Block(branches=tuple(branches)),) * 2) if encoder else spec


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_request_takes_its_cache_and_its_busiest_pass(dtype: torch.dtype) -> None:
    described, w = spec(), dtype.itemsize
    held = Cache(described, batch=1, capacity=25, dtype=dtype).nbytes
    assert held == 25 * 2 * 2 * 4 * w  # k and v of 4 numbers in 2 layers
    whole = memory(described).peak_bytes(Pass(tokens=20, logits="last", width=w))
    assert request_bytes(described, 20, 5, dtype, None, None) == held + whole
    assert request_bytes(described, 20, 5, dtype, 99, None) == held + whole
    chunked = request_bytes(described, 20, 5, dtype, 4, None)
    assert (
        chunked == held + memory(described).peak_bytes(Pass(tokens=4, past=16, logits="last", width=w)) < held + whole
    )


def test_a_source_is_counted_too() -> None:
    described = spec(encoder=True)
    held = Cache(described, batch=1, capacity=6, source=30, dtype=BF16).nbytes
    assert held == 6 * 2 * 2 * 4 * 2 + 30 * 2 * 2 * 8 * 2
    more = request_bytes(described, 1, 5, BF16, None, 30)
    assert more == held + memory(described).peak_bytes(Pass(tokens=1, source=30, logits="last", width=2))
    assert more > cost.cache(described, 6, "bf16", 30).at_seq
