"""The lines and tables that `describe` prints, in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from asbuilt.shown import defaults_line, number, ranges, shape, size
from asbuilt.tables import Table

# the block formats that models are mostly published in; the document has all
SHOWN = ("fp32", "bf16", "fp8", "int8", "int4", "q8_0", "q6_k", "q5_k", "q4_k", "q4_0")
FLOPS = {
    "products_per_token": "weight products",
    "scores_per_token": "attention, full scores",
    "scores_per_token_causal": "attention, masked pairs skipped",
    "forward_per_token": "forward, full scores",
    "forward_per_token_causal": "forward, masked pairs skipped",
    "training_per_token": "training, full scores",
}
ROW = {
    "path": "path",
    "part": "part",
    "count": "count",
    "parameters": "parameters",
    "flops_per_token": "FLOPs per token",
    "cache_bytes_per_token": "cache bytes per token",
}


def printed(bill: dict[str, Any]) -> Iterator[str | Table]:
    """Yields the lines and tables of a document; an empty line is a separator."""
    yield headline(bill)
    if bill["defaults"]:
        yield defaults_line(bill["defaults"])
    yield parameters(bill)
    yield from weights(bill)
    yield flops(bill)
    yield from memory(bill)
    yield rows(bill)
    yield from map(shapes, bill["shapes"])
    yield Table("Conventions", ("term", "meaning"), list(bill["conventions"].items()))


def headline(bill: dict[str, Any]) -> str:
    """Returns the model's name, family, size and context on one line."""
    return (
        f"{bill['name']} ({bill['family'] or 'no published family'}): {number(bill['parameters']['total'])} "
        f"parameters, context {number(bill['context'])} tokens"
    )


def parameters(bill: dict[str, Any]) -> Table:
    """Returns the parameters by kind of part, in total, active per token, and as stored."""
    counts = bill["parameters"]
    kinds = [(kind, n) for kind, n in counts.items() if n and kind not in ("total", "active")]
    rows = [(kind, n, f"{n / counts['total']:.1%}") for kind, n in [*kinds, ("total", counts["total"])]]
    if counts["active"] != counts["total"]:
        rows.append(("active per token", counts["active"], f"{counts['active'] / counts['total']:.1%}"))
        without = bill["active_parameters"]["without_tables"]
        if without != counts["active"]:
            rows.append(("active, without input embeddings", without, f"{without / counts['total']:.1%}"))
    rows += [(f"also stored: {what}", n, "") for what, n in bill["stored_extra"].items() if n]
    if bill["parameters_stored"] != counts["total"]:
        rows.append(("as stored in the file", bill["parameters_stored"], ""))
    return Table("Parameters", ("kind", "number", "share"), rows)


def weights(bill: dict[str, Any]) -> Iterator[str | Table]:
    """Yields the bytes of the weights by dtype, and a line if their packing is not supported by plans."""
    shown = [*SHOWN, *({bill["dtype"]} - {*SHOWN})]
    rows = [(name, bill["weight_bytes"][name], size(bill["weight_bytes"][name])) for name in shown]
    if bill["stored_bytes"] is not None:
        rows.append(("as stored in the file", bill["stored_bytes"], size(bill["stored_bytes"])))
    packed = bill["packed"]
    if packed is not None and packed["problem"] is None:
        rows.append((f"as published: {packed['format']}", packed["weight_bytes"], size(packed["weight_bytes"])))
    yield Table("Weights", ("dtype", "bytes", "size"), rows)
    if packed is not None and packed["problem"] is not None:
        yield ""
        yield f"Plans do not support the packing of these weights: {packed['problem']}"


def flops(bill: dict[str, Any]) -> Table:
    """Returns the FLOPs of one token."""
    found = bill["flops"]
    title = f"FLOPs per token, averaged over {number(found['seq'])}"
    return Table(title, ("", "FLOPs"), [(name, found[key]) for key, name in FLOPS.items()])


def memory(bill: dict[str, Any]) -> Iterator[str | Table]:
    """Yields cache, decode step and activations."""
    seq = number(bill["seq"])
    if bill["decode"] is None:
        yield ""
        yield "No cache and no decode step: attention is bidirectional."
    else:
        yield cache(bill)
        yield decode(bill["decode"], f"at {seq} tokens, weights {bill['dtype']}, cache {bill['cache']['dtype']}")
    saved = bill["activations"]
    kept = [
        ("saved for backward, no checkpointing", saved["saved_bytes"]),
        ("saved for backward, every block checkpointed", saved["checkpointed_bytes"]),
        ("of the largest block, while it is recomputed", saved["largest_block_bytes"]),
        ("saved for backward by the loss", saved["loss_bytes"]),
        ("logits", bill["logits_bytes"]),
    ]
    yield _bytes(f"Activations of {number(bill['batch'])} x {seq} tokens, {saved['dtype']}", kept)


def cache(bill: dict[str, Any]) -> Table:
    """Returns the bytes of the cache, per token and for the sequences."""
    found = bill["cache"]
    rows = [("per token", found["bytes_per_token"])]
    if found["bytes_per_token_expanded"] != found["bytes_per_token"]:
        rows.append(("per token, if keys and values were cached", found["bytes_per_token_expanded"]))
    if found["bytes_per_source_token"]:
        rows.append(("per encoder token", found["bytes_per_source_token"]))
    if found["window_bytes"]:
        rows.append(("per token, once windows are full", found["bytes_per_token_unbounded"]))
        rows.append(("full windows", found["window_bytes"]))
    rows.append((f"one sequence of {number(bill['seq'])} tokens", found["bytes_at_seq"]))
    if bill["batch"] > 1:
        rows.append((f"{number(bill['batch'])} sequences", found["bytes_at_seq_batch"]))
    return _bytes(f"Cache, {found['dtype']}", rows)


def decode(found: dict[str, Any], where: str) -> Table:
    """Returns the memory traffic of one decode step."""
    moved = [(f"weights: {kind}", nbytes) for kind, nbytes in found["weight_bytes"].items()]
    moved += [("embedding rows", found["lookup_bytes"]), ("cache", found["cache_bytes"])]
    return _bytes(f"Bytes moved by one decode step {where}", [*moved, ("total", found["total_bytes"])])


def rows(bill: dict[str, Any]) -> Table:
    """Returns the costs by path, equal blocks folded."""
    title = "By part; figures are for one of `count` equal parts"
    return Table(title, tuple(ROW.values()), [[row[key] for key in ROW] for row in bill["rows"]], drop=("part",))


def shapes(way: dict[str, Any]) -> Table:
    """Returns the shapes of one token's vector through a distinct block."""
    block = way["path"].removesuffix("s").replace(".", " ")
    title = f"One token's vector through {block} {ranges(way['blocks'])}, {number(way['seq'])} tokens in context"
    rows = [
        (step["path"], step["step"], shape(step["input"]), shape(step["by"]), shape(step["output"]), step["flops"])
        for step in way["steps"]
    ]
    return Table(title, ("path", "step", "input", "by", "output", "FLOPs"), rows, drop=("by", "input"))


def _bytes(title: str, rows: list[tuple[str, int]]) -> Table:
    return Table(title, ("", "bytes", "size"), [(name, n, size(n)) for name, n in rows])
