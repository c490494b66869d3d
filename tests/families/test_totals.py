"""Published models of these families, read from their config.json: parameters, cache and components as published."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from asbuilt.families import FAMILIES, load_config_file, read_config, tensor_table
from asbuilt.spec import AdaptiveHead, Model, SharedEmbedding, SideTransformer, TiedHead, walk, weights

MODELS = Path(__file__).parents[3] / "shared" / "models"
BF16 = 2
# breakdown.json names the parts so
# Numbers of a token that the published code keeps and no layer reads: Transformer-XL's memory of its last output.
NEVER_READ = {"transfo-xl-wt103": 1024}
RELATIVE = "relative_position"  # a part of attention here
COMPONENTS = {
    "embedding": "embeddings",
    "norm": "norms",
    "attention": "attention",
    "ssm": "ssm",
    "ffn": "mlp",
    "router": "router",
    "projector": "projector",
    "head": "lm_head",
    "other": "other",
}


def rows() -> list[dict[str, str]]:
    """The rows of totals.csv that these families publish; one empty row where the folder is absent."""
    if not (MODELS / "totals.csv").exists():
        return [{"name": ""}]
    with (MODELS / "totals.csv").open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["family"] in FAMILIES]


def load(row: dict[str, str]) -> Model:
    if not row["name"]:
        pytest.skip(f"no published models at {MODELS}")
    name = row["name"]
    return read_config(load_config_file(MODELS / f"{name}.json"), name).spec


def components(spec: Model) -> dict[str, int]:
    counts: Counter[str] = Counter()
    recurrent = tuple(f"{path}." for path, part in walk(spec) if part.kind == "ssm")
    for path, weight, owner in weights(spec):
        kind = "ssm" if path.startswith(recurrent) else owner.kind
        kind = "router" if path.endswith(".shared_gate.weight") else kind  # as it is counted there
        counts["pooler" if path.startswith("pooler.") else COMPONENTS[kind]] += weight.size
    return dict(counts)


def used_again(spec: Model) -> int:
    """What would be stored again if each use of shared weights had its own, with the low-rank maps of all its uses."""
    sides = [part for _, part in walk(spec) if isinstance(part, SideTransformer)]
    own = lambda part: sum(weight.size for _, one in walk(part) for weight in one.holds().values())  # noqa: E731
    maps: Counter[str] = Counter()
    for side in sides:
        name = side.shared.weights_name or side.shared.weights_from or ""
        maps[name] += sum(own(part) for name, part in side.maps.items() if name != "project")
    borrowed = [side.shared for side in sides if side.shared.weights_from is not None]
    return sum(own(shared) + maps[shared.weights_from or ""] for shared in borrowed)


by_name = pytest.mark.parametrize("row", rows(), ids=lambda row: row["name"] or "absent")


@by_name
def test_parameters(row: dict[str, str]) -> None:
    spec = load(row)
    total = sum(weight.size for _, weight, _ in weights(spec))
    head = spec.head
    tied = isinstance(head, TiedHead) or (isinstance(head, AdaptiveHead) and head.clusters[0].tied)
    assert total == int(row["params_total"])
    assert str(tied) == row["tied"]
    # a shared table is there once more for each stack, and once more for a tied head
    again = int(tied) + 2 * isinstance(spec.prompted.embedding, SharedEmbedding)
    table = again * spec.n_vocab * spec.d_model
    if row["params_with_tied_counted_twice"]:  # not counted for what is known from a paper alone
        # a bias of the head that is stored under two names is counted twice too
        twice = {path for path in tensor_table(row["family"], spec).duplicates.values() if path != "embedding.weight"}
        again = table + sum(weight.size for path, weight, _ in weights(spec) if path in twice and not spec.holders)
        again += used_again(spec)
        assert total + again == int(row["params_with_tied_counted_twice"])


@by_name
def test_cache_bytes_per_token(row: dict[str, str]) -> None:
    kept = [kept for _, part in walk(load(row)) for kept in part.remembers()]
    held = sum(one.size for one in kept if one.grows) + NEVER_READ.get(row["name"], 0)
    assert held * BF16 == int(row["kv_bytes_per_token_bf16"])
    published: dict[str, Any] = json.loads((MODELS / "breakdown.json").read_text())[row["name"]]["kv_cache"]
    source = sum(one.size for one in kept if one.of == "source") * BF16
    assert source == published.get("cross_bytes_per_source_token", 0)


@by_name
def test_components(row: dict[str, str]) -> None:
    spec = load(row)
    published: dict[str, Any] = json.loads((MODELS / "breakdown.json").read_text())[row["name"]]
    # our parts of kind norm are theirs of the stream and of queries and keys together
    wanted = {name: size for name, size in published["components"].items() if name not in ("qk_norm", RELATIVE)}
    wanted["attention"] = wanted.get("attention", 0) + published["components"].get(RELATIVE, 0)
    norms = published["components"].get("norms", 0) + published["components"].get("qk_norm", 0)
    assert components(spec) == {name: size for name, size in (wanted | {"norms": norms}).items() if size}


@by_name
def test_cache_within_windows(row: dict[str, str]) -> None:
    kept = [kept for _, part in walk(load(row)) for kept in part.remembers() if kept.grows]
    unbounded = sum(one.size for one in kept if one.window is None)
    assert unbounded * BF16 == int(row["kv_bytes_per_token_unbounded"])
    full = sum(one.size * one.window for one in kept if one.window is not None)
    full += NEVER_READ.get(row["name"], 0) * max((one.window or 0 for one in kept), default=0)
    assert full * BF16 == int(row["window_cap_bytes_per_sequence"])
