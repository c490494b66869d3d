"""`asbuilt describe`: what a model is and what it costs, from its description alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from asbuilt.cli.opening import allow_unread_option, defaults_line, opened
from asbuilt.cli.output import count, print_json, ranges, say, shape, size, table, warn
from asbuilt.cli.types import LARGEST, Tokens

if TYPE_CHECKING:
    from asbuilt.checkpoint.source import Source

# of the block formats, those that models are mostly published in; --json has all
SHOWN = ("fp32", "bf16", "fp8", "int8", "int4", "q8_0", "q6_k", "q5_k", "q4_k", "q4_0")


@click.command()
@click.argument("model")
@click.option("--seq", type=Tokens(), help="Tokens per sequence; 1024, or the context if less.")
@click.option("--batch", type=click.IntRange(1, LARGEST), default=1, show_default=True, help="Sequences at once.")
@click.option("--images", type=click.IntRange(0, LARGEST), default=0, show_default=True, help="Of each sequence.")
@click.option(
    "--dtype", default="bf16", show_default=True, help="Of weights and activations; also q4_k, q4_k_m, q8_0 ..."
)
@click.option("--kv-dtype", help="Of the cache; as --dtype where that is a float of 16 bits or more, else bf16.")
@allow_unread_option
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of tables.")
def describe(
    model: str,
    seq: int | None,
    batch: int,
    images: int,
    dtype: str,
    kv_dtype: str | None,
    allow_unread: tuple[str, ...],
    as_json: bool,
) -> None:
    """What MODEL is made of and what it costs: parameters, FLOPs, bytes, cache, shapes. Nothing is run."""
    from asbuilt.cli import bill

    source = opened(model, allow_unread)
    document = bill.describe(
        source,
        seq=_length(source, seq, bill.DEFAULT_SEQ),
        batch=batch,
        images=images,
        dtype=dtype,
        kv_dtype=kv_dtype or bill.activation_dtype(dtype),
    )
    if as_json:
        print_json(document)
    else:
        _print(document)


def _length(source: Source, seq: int | None, usual: int) -> int:
    context = source.spec.max_positions
    if source.spec.n_vocab == 0:
        if seq not in (None, context):
            warn(f"warning: an image is {context} tokens, whatever --seq says")
        return context
    if seq is not None and seq > context:
        warn(f"warning: --seq {seq} is beyond the context of {context} tokens")
    return min(usual, context) if seq is None else seq


def _print(bill: dict[str, Any]) -> None:
    parameters = bill["parameters"]
    say(
        f"{bill['name']} ({bill['family'] or 'no published family'}): {count(parameters['total'])} parameters, "
        f"context {count(bill['context'])} tokens"
    )
    if bill["defaults"]:
        say(defaults_line(bill["defaults"]))
    _print_parameters(bill)
    _print_weights(bill)
    _print_flops(bill)
    _print_memory(bill)
    _print_rows(bill)
    for shapes in bill["shapes"]:
        _print_shapes(shapes)
    table("Conventions", ("of", "what is meant"), list(bill["conventions"].items()))


def _print_parameters(bill: dict[str, Any]) -> None:
    counts = bill["parameters"]
    kinds = [(kind, n) for kind, n in counts.items() if n and kind not in ("total", "active")]
    rows = [(kind, n, f"{n / counts['total']:.1%}") for kind, n in [*kinds, ("total", counts["total"])]]
    if counts["active"] != counts["total"]:
        rows.append(("active per token", counts["active"], f"{counts['active'] / counts['total']:.1%}"))
        without = bill["active_parameters"]["without_tables"]
        if without != counts["active"]:
            rows.append(("the same without the input tables", without, f"{without / counts['total']:.1%}"))
    rows += [(f"stored beside them: {what}", n, "") for what, n in bill["stored_extra"].items() if n]
    if bill["parameters_stored"] != counts["total"]:
        rows.append(("as stored in the file", bill["parameters_stored"], ""))
    table("Parameters", ("kind", "number", "share"), rows)


def _print_weights(bill: dict[str, Any]) -> None:
    shown = [*SHOWN, *({bill["dtype"]} - {*SHOWN})]
    rows = [(name, bill["weight_bytes"][name], size(bill["weight_bytes"][name])) for name in shown]
    if bill["stored_bytes"] is not None:
        rows.append(("as stored in the file", bill["stored_bytes"], size(bill["stored_bytes"])))
    packed = bill["packed"]
    if packed is not None and packed["problem"] is None:
        rows.append((f"as published: {packed['format']}", packed["weight_bytes"], size(packed["weight_bytes"])))
    table("Weights", ("dtype", "bytes", "size"), rows)
    if packed is not None and packed["problem"] is not None:
        say()
        say(f"The weights are packed in a way that is not planned: {packed['problem']}")


def _print_flops(bill: dict[str, Any]) -> None:
    flops = bill["flops"]
    names = {
        "products_per_token": "products with weights",
        "scores_per_token": "scores and mixing, in full",
        "scores_per_token_causal": "scores and mixing, masked pairs skipped",
        "forward_per_token": "forward, full scores",
        "forward_per_token_causal": "forward, masked pairs skipped",
        "training_per_token": "training, full scores",
    }
    table(f"FLOPs per token, mean of {count(flops['seq'])}", ("", "FLOPs"), [(names[k], flops[k]) for k in names])


def _print_memory(bill: dict[str, Any]) -> None:
    seq = count(bill["seq"])
    if bill["decode"] is None:
        say()
        say("No cache and no decode step: tokens see those after them, so a text is read whole.")
    else:
        _print_cache(bill)
        _print_decode(bill["decode"], f"at {seq} tokens, weights {bill['dtype']}, cache {bill['cache']['dtype']}")
    saved = bill["activations"]
    kept = [
        ("saved, no checkpointing", saved["saved_bytes"]),
        ("saved, every block checkpointed", saved["checkpointed_bytes"]),
        ("of the largest block, while it runs again", saved["largest_block_bytes"]),
        ("saved by the loss", saved["loss_bytes"]),
        ("logits", bill["logits_bytes"]),
    ]
    _print_bytes(f"Activations of {count(bill['batch'])} x {seq} tokens, {saved['dtype']}", kept)


def _print_cache(bill: dict[str, Any]) -> None:
    cache = bill["cache"]
    rows = [("per token", cache["bytes_per_token"])]
    if cache["bytes_per_token_expanded"] != cache["bytes_per_token"]:
        rows.append(("per token, were keys and values kept", cache["bytes_per_token_expanded"]))
    if cache["bytes_per_source_token"]:
        rows.append(("per token that the encoder read", cache["bytes_per_source_token"]))
    if cache["window_bytes"]:
        rows.append(("per token once windows are full", cache["bytes_per_token_unbounded"]))
        rows.append(("full windows", cache["window_bytes"]))
    rows.append((f"a sequence of {count(bill['seq'])}", cache["bytes_at_seq"]))
    if bill["batch"] > 1:
        rows.append((f"{count(bill['batch'])} of them", cache["bytes_at_seq_batch"]))
    _print_bytes(f"Cache, {cache['dtype']}", rows)


def _print_decode(decode: dict[str, Any], where: str) -> None:
    moved = [(f"weights: {kind}", nbytes) for kind, nbytes in decode["weight_bytes"].items()]
    moved += [("embedding rows", decode["lookup_bytes"]), ("cache", decode["cache_bytes"])]
    _print_bytes(f"Bytes moved by one decode step {where}", [*moved, ("total", decode["total_bytes"])])


def _print_bytes(title: str, rows: list[tuple[str, int]]) -> None:
    table(title, ("", "bytes", "size"), [(name, n, size(n)) for name, n in rows])


def _print_rows(bill: dict[str, Any]) -> None:
    keys = ("path", "part", "count", "parameters", "flops_per_token", "cache_bytes_per_token")
    columns = ("path", "part", "count", "parameters", "FLOPs per token", "cache bytes per token")
    table(
        "By part; figures are of one of `count` equal parts",
        columns,
        [[row[k] for k in keys] for row in bill["rows"]],
        drop=("part",),
    )


def _print_shapes(shapes: dict[str, Any]) -> None:
    block = shapes["path"].removesuffix("s").replace(".", " ")
    title = f"One token's vector through {block} {ranges(shapes['blocks'])}, {count(shapes['seq'])} tokens in context"
    rows = [
        (step["path"], step["step"], shape(step["input"]), shape(step["by"]), shape(step["output"]), step["flops"])
        for step in shapes["steps"]
    ]
    table(title, ("path", "step", "input", "by", "output", "FLOPs"), rows, drop=("by", "input"))
