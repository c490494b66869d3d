"""The report on a real architecture at a size that is quick: exact figures exact, memory within its tolerance."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from asbuilt import cost
from asbuilt.families import read_config
from asbuilt.kernels.memory import memory
from asbuilt.measure import counted, measure, micro, report
from asbuilt.measure import run as measured
from asbuilt.measure.rates import TimeGrid
from asbuilt.measure.report import MEMORY, Row
from asbuilt.measure.trace import LINES, trace
from asbuilt.nn import build
from asbuilt.nn.model import Model as Built
from asbuilt.spec import MixtureOfExperts, Model, Part, Pass
from asbuilt.spec.part import Weight


def middling(family: str) -> Model:
    if family != "gpt2":
        config = {
            "model_type": family,
            "vocab_size": 5003,
            "hidden_size": 384,
            "intermediate_size": 1000,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "max_position_embeddings": 1024,
        }
        if family == "mixtral":
            config |= {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    else:
        config = {
            "model_type": "gpt2",
            "vocab_size": 5003,
            "n_embd": 384,
            "n_layer": 3,
            "n_head": 6,
            "n_positions": 1024,
        }
    return read_config(config, family).spec


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for rounds in ("DECODE_ROUNDS", "PREFILL_ROUNDS", "SMALL_ROUNDS"):
        monkeypatch.setattr(micro, rounds, 1)
    monkeypatch.setattr(micro, "PROBE_STEPS", 4)
    monkeypatch.setattr(report, "DRIFT", float("inf"))  # no speed matters here


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", ["fused", "reference"])
def test_peak_memory_of_prefill(family: str, dtype: torch.dtype, kernel: str) -> None:
    spec = middling(family)
    model = build(spec, dtype=dtype)
    ids = torch.zeros(1, 512, dtype=torch.long)
    run = Pass(tokens=512, logits="last", kernel=kernel, width=dtype.itemsize)  # type: ignore[arg-type]

    def prefill() -> None:
        model(ids, last=True, kernel=kernel)  # type: ignore[arg-type]

    with torch.inference_mode():
        prefill()
        peak = measured.peak_bytes(prefill)
    assert memory(spec).peak_bytes(run) <= peak <= memory(spec).peak_bytes(run) + scratch(model, dtype) + 20_000


def scratch(model: Built, dtype: torch.dtype) -> int:
    """The most that the library takes beside a product's result for one of the model's matrices, found without it."""
    matrices = {p.shape for p in model.parameters() if p.dim() == 2}
    found = 0
    with torch.inference_mode():
        for rows, columns in itertools.chain(matrices, (shape[::-1] for shape in matrices)):
            x, weight = torch.ones(512, columns, dtype=dtype), torch.ones(rows, columns, dtype=dtype)
            F.linear(x, weight)
            peak = measured.peak_bytes(partial(F.linear, x, weight))
            found = max(found, peak - 512 * rows * dtype.itemsize)
    return found


def test_report_is_exact_where_it_says_so() -> None:
    spec = middling("llama")
    found = measure(build(spec, dtype=torch.bfloat16))
    assert found.ok, [row for row in found.rows if not row.ok]
    exact = [row for row in found.rows if row.tolerance == 0]
    assert len(exact) >= 5
    assert all(row.predicted == row.measured for row in exact)
    assert {row.unit for row in found.rows} == {"", "bytes", "FLOPs", "tokens/s"}
    assert all(row.measured > 0 for row in found.rows)


def test_a_wrong_prediction_is_not_ok() -> None:
    row = Row(figure="weights", unit="bytes", predicted=1000, measured=1001, tolerance=0.0)
    assert not row.ok
    assert row.error == pytest.approx(0.001)
    assert Row(figure="weights", unit="bytes", predicted=1000, measured=1001, tolerance=MEMORY).ok


@given(st.data())
def test_a_table_goes_through_its_points_and_is_right_of_powers(data: st.DataObject) -> None:
    """t = c x^a y^b is a plane in the logarithms, so it is met everywhere but below the grid, where the edge holds."""
    axes = tuple(tuple(sorted(data.draw(st.sets(st.integers(2, 5000), min_size=2, max_size=4)))) for _ in range(2))
    c, a, b = (data.draw(st.floats(0.1, 3.0)) for _ in range(3))
    table = TimeGrid(axes, tuple(c * x**a * y**b for x in axes[0] for y in axes[1]))
    sizes = [data.draw(st.integers(1, 10**5)) for _ in range(2)]
    x, y = (max(size, axis[0]) for size, axis in zip(sizes, axes, strict=True))
    assert table.at(*sizes) == pytest.approx(c * x**a * y**b, rel=1e-9)


def test_a_table_bends_at_its_points() -> None:
    table = TimeGrid(((1, 10, 100),), (2.0, 4.0, 400.0))
    assert [table.at(size) for size in (1, 10, 100)] == pytest.approx([2.0, 4.0, 400.0])
    assert table.at(10**0.5) == pytest.approx(8**0.5)
    assert table.at(1000) == pytest.approx(40000.0)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_trace_finds_the_declared_work(family: str) -> None:
    spec = middling(family)
    decode = trace(spec, tokens=1, past=40, dtype=torch.bfloat16)
    read = sum(call.amount for call in decode.calls if call.work == "vector")
    moved = cost.moved(spec, Pass(tokens=1, past=40), "bf16", "bf16")
    matrices = sum(2 * _read_by_one_row(*item) for item in _matrices(spec))
    assert read == matrices
    assert sum(call.amount for call in decode.calls if call.work == "attention_read") == moved.cache
    prefill = trace(spec, tokens=64, past=0, dtype=torch.bfloat16)
    flops = cost.flops(spec, Pass(tokens=64, logits="last"))
    head = 2 * spec.d_model * spec.n_vocab  # one row: read, not multiplied at the matrix rate
    assert sum(c.amount for c in prefill.calls if c.work == "matrix") == flops.products - head
    assert sum(c.amount for c in prefill.calls if c.work == "attention") == flops.scores


def _matrices(spec: Model):  # noqa: ANN202
    from asbuilt.spec import weights

    multiplied = {p.weight_path for p in cost.products(spec, Pass(tokens=1))}
    return [item for item in weights(spec) if item[0] in multiplied]


def _read_by_one_row(path: str, weight: Weight, owner: Part) -> int:
    """All of a matrix; of a stack of experts those that are chosen."""
    if isinstance(owner, MixtureOfExperts) and path.rpartition(".")[2] in owner.spreads():
        return weight.size // owner.n_experts * owner.top_k
    return weight.size


def test_an_encoder_decoder_is_counted_too() -> None:
    config = {
        "model_type": "t5",
        "vocab_size": 3001,
        "d_model": 128,
        "d_kv": 32,
        "d_ff": 300,
        "num_layers": 2,
        "num_heads": 4,
        "n_positions": 256,
    }
    rows = list(counted(build(read_config(config, "t5").spec)))
    assert [row.figure for row in rows if not row.ok] == []
    assert any("read and one written" in row.figure for row in rows)


def test_every_function_that_a_trace_names_is_timed() -> None:
    assert {*LINES.values(), "view", "arithmetic", "gelu tanh"} == set(micro.LINES)
