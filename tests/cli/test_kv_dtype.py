"""`--kv-dtype`, in the commands that have it: the same names mean the same bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import Result

import asbuilt
import asbuilt.cli.measure
import asbuilt.measure
from asbuilt.checkpoint.load import load
from asbuilt.checkpoint.source import open_model
from asbuilt.generate.compute import request_bytes
from asbuilt.generate.decode import generate
from asbuilt.kernels.codes import NAMES
from asbuilt.measure import Report, Text, in_format
from asbuilt.measure.loss import nats_per_token
from asbuilt.nn.cache import Cache

Run = Callable[..., Result]
PROMPT = "An as-built drawing"
D = 8  # the checkpoint's width of a head
SIZE = {"int8:head": 10, "fp8:head": 10, "int4:head": 8}  # bytes of a vector of it
SCALED = tuple(SIZE)


@pytest.mark.parametrize("kv", [*SCALED, "bf16", "fp8"])
def test_generate_is_the_librarys(run: Run, checkpoint: Path, kv: str) -> None:
    result = run("generate", checkpoint, PROMPT, "--max-new-tokens", 12, "--kv-dtype", kv, "--json")
    assert result.exit_code == 0, result.output
    said, model, tokenizer = json.loads(result.stdout), load(checkpoint), open_model(checkpoint).tokenizer()
    assert tokenizer is not None
    ids = tokenizer.encode(PROMPT, wrap=True)
    eos = open_model(checkpoint).eos_ids
    assert said["tokens"] == [t for (t,) in generate(model, [ids], max_new_tokens=12, eos_ids=eos, kv_dtype=kv)]
    assert said["kv_dtype"] == kv
    assert asbuilt.generate(model, ids, max_new_tokens=12, kv_dtype=kv) == [
        t for (t,) in generate(model, [ids], max_new_tokens=12, kv_dtype=kv)
    ]


@pytest.mark.parametrize("command", ["generate", "measure"])
@pytest.mark.parametrize(
    ("kv", "said"),
    [
        ("int8", "int8:head has a scale for each token and head"),
        ("q4_0", "int4:head has a scale for each token and head"),
        ("wide", "must be fp64, fp32, bf16, fp16, fp8, int8:head, fp8:head or int4:head"),
    ],
)
def test_formats_that_no_cache_has(run: Run, checkpoint: Path, command: str, kv: str, said: str) -> None:
    more = [PROMPT] if command == "generate" else []
    result = run(command, checkpoint, *more, "--kv-dtype", kv)
    assert result.exit_code == 2
    assert "kv-dtype: not a format of our caches" in result.stderr
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("kv", NAMES)
def test_describe_and_plan_bill_what_is_allocated(run: Run, checkpoint: Path, kv: str) -> None:
    spec = open_model(checkpoint).spec
    own = Cache(spec, batch=1, capacity=20, dtype=torch.bfloat16, kv=kv).nbytes
    described = json.loads(run("describe", checkpoint, "--seq", 20, "--kv-dtype", kv, "--json").stdout)
    assert described["cache"]["dtype"] == kv
    assert described["cache"]["bytes_at_seq"] == own == described["decode"]["cache_bytes"]
    planned = asbuilt.plan(spec, "l4", context=20, kv_dtype=kv)
    document = planned.document()
    assert document["kv_dtype"] == kv
    assert document["cache_bytes"]["minimum"] == own
    assert document["cache_bytes"]["paged"] == own // 20 * 32  # pages of 16 tokens
    (line,) = [line for line in planned.counted if line.name == "cache per user"]
    assert line.value == own // 20 * 32
    if kv in SCALED:
        assert document["cache_bytes"]["object"] == own
        assert line.formula == f"ceil({{vectors of {D}}} × {{bytes of a vector of {D}}})"
        assert line.numbers == {f"vectors of {D}": own // 20 * 32 // SIZE[kv], f"bytes of a vector of {D}": SIZE[kv]}


def test_the_memory_that_a_request_needs_falls_with_the_cache(checkpoint: Path) -> None:
    spec = open_model(checkpoint).spec
    needs = [
        request_bytes(spec, 20, 10, torch.float32, None, None, kv) for kv in (None, "bf16", "int8:head", "int4:head")
    ]
    assert needs == sorted(needs, reverse=True)
    held = [Cache(spec, batch=1, capacity=30, dtype=torch.float32, kv=kv).nbytes for kv in ("fp32", "int4:head")]
    assert needs[0] - needs[-1] == held[0] - held[1]


def test_measure_shows_bytes_and_loss(checkpoint: Path) -> None:
    model = load(checkpoint, torch.float32)
    text = Text(ids=list(range(3, 40)))
    for kv in (*SCALED, "bf16"):
        held, loss = in_format(model, kv, text)
        assert (held.predicted, held.tolerance, held.unit) == (held.measured, 0.0, "bytes")
        assert loss.predicted == nats_per_token(model, text.ids) != loss.measured
        assert loss.measured == nats_per_token(model, text.ids, kv=kv)
        assert loss.tolerance == (0.05 if kv == "int4:head" else 0.001)
        assert abs(loss.error) < 0.05


def test_measure_hands_on_what_is_asked(
    run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[tuple[str | None, Text | None]] = []

    def measure(model: object, *, kv: str | None, text: Text | None, **_: object) -> Report:
        seen.append((kv, text))
        raise KeyboardInterrupt

    monkeypatch.setattr(asbuilt.measure, "measure", measure)
    file = tmp_path / "drawing.txt"
    file.write_text("An as-built drawing records what was built. " * 30)
    run("measure", checkpoint, "--kv-dtype", "INT8:head", "--text", file, "--tokens", 50)
    run("measure", checkpoint, "--kv-dtype", "fp8")
    run("measure", checkpoint)
    (first, read), (second, sampled), third = seen
    assert (first, second, third) == ("int8:head", "fp8", (None, None))
    assert read is not None
    assert sampled is not None
    assert (len(read.ids), read.sampled, sampled.sampled) == (50, False, True)
    assert 2 <= len(sampled.ids) <= 256
    alone = run("measure", checkpoint, "--text", file)
    assert (alone.exit_code, "give --kv-dtype too" in alone.stderr) == (2, True)
    missing = run("measure", checkpoint, "--kv-dtype", "fp8", "--text", tmp_path / "nothing")
    assert missing.exit_code == 2
