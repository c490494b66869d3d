"""`asbuilt describe`: its figures against those published, against the folds they come from, and against each other."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import strategies
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from asbuilt import cost
from asbuilt.checkpoint.source import Source, open_model
from asbuilt.cli.main import cli
from asbuilt.cli.output import ranges
from asbuilt.description import bill
from asbuilt.families import FAMILIES, Reading
from asbuilt.spec import KINDS, Model, Pass, dumps, walk
from asbuilt.spec.part import LARGEST_SIZE, runs

Run = Callable[..., Result]
MODELS = Path(__file__).parents[3] / "shared" / "models"
COMPONENTS = {"embedding": "embeddings", "norm": "norms", "attention": "attention", "ffn": "mlp", "head": "lm_head"}
COMPONENTS |= {"router": "router", "projector": "projector", "other": "other"}


def published() -> list[dict[str, str]]:
    if not (MODELS / "totals.csv").exists():
        return []
    with (MODELS / "totals.csv").open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["family"] in FAMILIES]


def said(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def described(spec: Model, seq: int, batch: int = 1) -> dict[str, Any]:
    reading = Reading(spec=spec, carried={}, dtype=None, family="")
    source = Source(kind="spec", name=spec.name, reading=reading)
    return bill.describe(source, seq=seq, batch=batch, dtype="bf16", kv_dtype="bf16")


def test_llama_3_8b(run: Run) -> None:
    """The figures that the project's issue states for this model, each derivable from its published dimensions."""
    document = said(run("describe", "llama-3-8b", "--json"))
    assert document["family"] == "llama"
    assert document["parameters"] == {
        "total": 8_030_261_248,
        "active": 8_030_261_248,
        "embedding": 525_336_576,
        "attention": 1_342_177_280,
        "ffn": 5_637_144_576,
        "ssm": 0,
        "norm": 266_240,
        "router": 0,
        "projector": 0,
        "head": 525_336_576,
        "other": 0,
    }
    assert document["flops"]["seq"] == 1024
    assert document["flops"]["products_per_token"] == 15_009_316_864
    assert document["flops"]["scores_per_token"] == 536_870_912
    assert document["cache"]["dtype"] == "bf16"
    assert document["cache"]["bytes_per_token"] == 131_072


@pytest.mark.parametrize("row", published(), ids=lambda row: row["name"])
def test_published_models(run: Run, row: dict[str, str]) -> None:
    document = said(run("describe", MODELS / f"{row['name']}.json", "--json"))
    breakdown = json.loads((MODELS / "breakdown.json").read_text())[row["name"]]
    assert document["parameters"]["total"] == int(row["params_total"])
    per_token, window = int(row["kv_bytes_per_token_bf16"]), int(row["window_cap_bytes_per_sequence"])
    if row["name"] == "transfo-xl-wt103":  # whose code keeps the last layer's output too, which no layer reads
        per_token, window = 18 * 1024 * 2, 18 * 1024 * 2 * 1600
    assert document["cache"]["bytes_per_token"] == per_token
    assert document["cache"]["bytes_per_token_unbounded"] == int(row["kv_bytes_per_token_unbounded"])
    assert document["cache"]["window_bytes"] == window
    if "ssm" in breakdown["components"]:  # with the norms within: tests/families/test_totals.py tells them apart
        return
    counts = {COMPONENTS[kind]: document["parameters"][kind] for kind in COMPONENTS}
    stated = {"qk_norm": 0, "norms": 0} | breakdown["components"]
    if "pooler" in stated:
        stated["other"] = stated.pop("pooler")
    # norms of queries and keys are ours of kind norm too; what is not stated is not there
    stated["norms"] += stated.pop("qk_norm")
    stated["attention"] += stated.pop("relative_position", 0)
    assert stated.keys() <= counts.keys()
    assert counts == dict.fromkeys(counts, 0) | stated


@given(st.data(), strategies.specs(), st.integers(1, 9), st.integers(1, 3))
def test_rows_add_up(data: st.DataObject, spec: Model, seq: int, batch: int) -> None:
    document = described(spec, seq=seq, batch=batch)
    rows, counts = document["rows"], document["parameters"]
    assert sum(row["parameters"] * row["count"] for row in rows) == counts["total"] == cost.total_parameters(spec)
    for kind in KINDS:
        assert sum(row["parameters"] * row["count"] for row in rows if row["kind"] == kind) == counts[kind]
    flops = sum(row["flops_per_token"] * row["count"] for row in rows)
    assert flops == pytest.approx(document["flops"]["forward_per_token"], rel=1e-12)
    held = sum(row["cache_bytes_per_token"] * row["count"] for row in rows) - document["cache"]["bytes_per_token"]
    # of what has an entry for several tokens bytes are rounded up, in rows and in the sum
    shared = any(r.every > 1 for _, part in walk(spec) for r in part.remembers())
    assert 0 <= held <= shared * sum(row["count"] for row in rows if row["cache_bytes_per_token"])
    moved = document["decode"]
    parts = sum(moved["weight_bytes"].values()) + moved["lookup_bytes"] + moved["cache_bytes"]
    assert parts == moved["total_bytes"]
    name = data.draw(st.sampled_from(sorted(document["weight_bytes"])))
    assert document["weight_bytes"][name] == cost.weight_bytes(spec, name)


@given(strategies.specs(), st.integers(1, 20))
def test_shapes_are_all_of_one_tokens_way(spec: Model, seq: int) -> None:
    """Each block stands once, and the products shown are all that the blocks multiply for one token."""
    shapes = described(spec, seq=seq)["shapes"]
    assert sorted(i for kind in shapes for i in kind["blocks"]) == list(range(spec.n_layers))
    for kind in shapes:
        assert len({spec.blocks[i] for i in kind["blocks"]}) == 1
        names = [branch.name for branch in spec.blocks[kind["blocks"][0]].branches]
        ends = [step for step in kind["steps"] if step["path"] in names]
        assert [step["path"] for step in ends] == names
        assert all(step["output"] == [spec.d_model] for step in ends)
    shown = sum(kind["count"] * step["flops"] for kind in shapes for step in kind["steps"])
    run = Pass(tokens=1, past=seq - 1)
    outside = [child for name, child in spec.children() if not name.startswith("blocks.")]
    seen = [found for child in outside for found in runs(child, run)]
    others = sum(product.flops for _, part, run in seen for product in part.multiplies(run))
    assert shown + others == cost.flops(spec, run).forward


@given(strategies.specs())
def test_human_tables_hold_the_same_figures(spec: Model) -> None:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "spec.json"
        file.write_text(dumps(spec))
        document = said(CliRunner().invoke(cli, ["describe", str(file), "--json"]))
        text = CliRunner().invoke(cli, ["describe", str(file)]).stdout
    for figure in (
        document["parameters"]["total"],
        document["weight_bytes"]["q4_k"],
        document["decode"]["total_bytes"],
    ):
        assert f"{figure:,}" in text
    assert text.count("One token's vector") == len(set(spec.blocks))
    assert "\x1b" not in text


def test_options_change_what_they_say(run: Run) -> None:
    plain = said(run("describe", "gpt2", "--json"))
    asked = said(run("describe", "gpt2", "--json", "--seq", 100, "--batch", 3, "--dtype", "float32"))
    spec = open_model("gpt2").spec
    assert asked["cache"]["dtype"] == asked["activations"]["dtype"] == "fp32"
    assert asked["cache"]["bytes_per_token"] == 2 * plain["cache"]["bytes_per_token"]
    assert asked["cache"]["bytes_at_seq_batch"] == 3 * cost.cache(spec, 100, "fp32").at_seq
    assert asked["logits_bytes"] == 3 * 100 * spec.n_vocab * 4
    assert asked["activations"]["saved_bytes"] == cost.saved(spec, Pass(tokens=100, batch=3, width=4)).all
    narrow = said(run("describe", "gpt2", "--json", "--dtype", "q4_0", "--kv-dtype", "fp8"))
    assert (narrow["decode"]["dtype"], narrow["activations"]["dtype"]) == ("q4_0", "bf16")
    assert 2 * narrow["cache"]["bytes_per_token"] == plain["cache"]["bytes_per_token"]


def test_length_is_the_context_where_that_is_less_and_warns_beyond(run: Run, checkpoint: Path) -> None:
    context = open_model(checkpoint).spec.max_positions
    usual = run("describe", checkpoint, "--json")
    assert said(usual)["flops"]["seq"] == context < bill.DEFAULT_SEQ
    assert usual.stderr == ""
    beyond = run("describe", checkpoint, "--json", "--seq", context + 1)
    assert said(beyond)["flops"]["seq"] == context + 1
    assert str(context) in beyond.stderr
    assert len(beyond.stderr.splitlines()) == 1


def test_the_longest_sequence_is_still_computed(run: Run) -> None:
    document = said(run("describe", "llama-3.1-405b", "--json", "--seq", LARGEST_SIZE, "--batch", LARGEST_SIZE))
    cache = document["cache"]
    assert cache["bytes_at_seq_batch"] == cache["bytes_per_token"] * LARGEST_SIZE**2


def test_stored_numbers_are_those_of_the_file(run: Run, checkpoint: Path) -> None:
    from safetensors.torch import load_file

    tensors = load_file(checkpoint / "model.safetensors").values()
    document = said(run("describe", checkpoint, "--json"))
    assert document["parameters_stored"] == sum(tensor.numel() for tensor in tensors)
    assert document["stored_bytes"] == sum(tensor.nbytes for tensor in tensors)
    (checkpoint / "model.safetensors").unlink()
    alone = said(run("describe", checkpoint, "--json"))
    assert alone["stored_bytes"] is None
    assert alone["parameters_stored"] == alone["parameters"]["total"]


@given(st.sets(st.integers(0, 40)))
def test_ranges(numbers: set[int]) -> None:
    text = ranges(sorted(numbers))
    read = [part.split("-") for part in text.split(", ") if part]
    assert {n for part in read for n in range(int(part[0]), int(part[-1]) + 1)} == numbers
    assert len(read) == sum(n - 1 not in numbers for n in numbers)
