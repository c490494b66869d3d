"""The JSON document of `describe` as plain data; its keys are never removed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import chain
from typing import TYPE_CHECKING, Any

from asbuilt import cost
from asbuilt.cost.folded import Held
from asbuilt.dtypes import GGUF_BLOCKS, GGUF_READABLE, PLAIN, TORCH_NAMES
from asbuilt.errors import InputError
from asbuilt.packing import block_scales, holding, packs_weights
from asbuilt.spec import Block, Branch, LayerNorm, Model, Part, Pass, Product, RMSNorm, Rotary, weights

if TYPE_CHECKING:
    from asbuilt.checkpoint.source import Source

WEIGHT_DTYPES = ("fp32", "bf16", "fp8", "int8", "int4", *GGUF_BLOCKS)
DEFAULT_SEQ = 1024
CONVENTIONS = {
    "flops": "a product (a,b)x(b,c) counts 2abc FLOPs; training is forward with full scores, plus twice that backward",
    "scores": "attention over every key, masked ones too; forward_per_token_causal skips masked pairs",
    "lookup": "an embedding lookup costs no FLOPs; its table counts towards the parameters",
    "units": "1 GB = 10^9 bytes, 1 GiB = 2^30 bytes",
    "parameters": "as built: tied tensors once; active: used by one token; parameters_stored: as stored in the file",
    "defaults": "sizes missing from config.json, taken from transformers' class",
    "notes": "keys of config.json that transformers ignores, but other programs read",
    "active_parameters": "only the experts that a token is routed to; with the whole input embedding, or without "
    "tables that a token only looks up, as many model cards count",
    "quantization": "how the weights are packed according to config.json, or hf_quant_config.json beside it; a stored "
    "byte then counts as one number; packed: as `plan serve` counts it",
    "stored_extra": "stored in a checkpoint besides the parameters as built: buffers, which are not trained, and "
    "layers for multi-token prediction, which no pass runs; scales: those of 8-bit weights, if config.json states "
    "them; minus positions that are computed rather than stored",
    "encoder": "reads as many tokens as the sequence has, once before decoding; FLOPs per token cover both stacks, "
    "divided by the decoder's tokens; cache bytes_per_source_token is per token that the encoder read",
    "cache": "the theoretical minimum, and the bytes of the cache object that generation allocates; for one sequence; "
    "expanded: if every head's keys and values were cached instead of the latents",
    "weights": "in block formats vectors stay fp32, as in GGUF files; stored_bytes is as in the file",
    "activations": "saved for backward by one forward pass with fused attention, without weights and gradients",
    "pooler": "its product runs once per sequence and only on request, so no FLOPs figure includes it",
    "decode": "one step of one token per sequence; weights are read once, the cache is read and written, activations "
    "are not counted; none for bidirectional attention",
}


def describe(
    source: Source, *, seq: int, batch: int, dtype: str, kv_dtype: str, images: int = 0, sounds: int = 0
) -> dict[str, Any]:
    """Returns all costs of a model at `batch` sequences of `seq` tokens, each with `images` images and `sounds` sounds.

    Raises InputError for an unknown dtype, for stored tensors that do not match the description, and for images and
    sounds that the model does not read or that do not fit in the text.
    """
    spec = source.spec
    _require_images(spec, seq, images, sounds)
    run = Pass(tokens=seq, batch=batch, images=images, sounds=sounds)
    width = int(PLAIN[activation_dtype(dtype)])
    counts = cost.parameters(spec)
    total, active = sum(counts.values()), cost.active_parameters(spec)
    extra = cost.stored_extra(spec) | {"scales": block_scales(source.family, spec, source.reading.quantization)}
    stored, stored_bytes = _stored(source)
    held = holding(source.family, spec, dtype)
    state = cost.state_beside(kv_dtype, activation_dtype(dtype))
    return {
        "name": source.name,
        "family": source.family,
        "context": spec.max_positions,
        "seq": seq,
        "batch": batch,
        "dtype": cost.format_name(dtype),
        "images": images,
        "sounds": sounds,
        "parameters": {"total": total, "active": active, **counts},
        "active_parameters": {
            "with_tables": active,
            "without_tables": cost.active_parameters(spec, tables=False),
        },
        "parameters_stored": total + sum(extra.values()) if stored is None else stored,
        "stored_extra": extra,
        "stored_bytes": stored_bytes,
        "quantization": source.reading.quantization,
        "defaults": source.reading.defaults,
        "notes": source.reading.notes,
        "packed": _packed(source),
        "flops": _flops(spec, run),
        "weight_bytes": _weight_bytes(spec) | {cost.format_name(dtype): cost.weight_bytes(spec, held)},
        "cache": _cache(spec, seq, batch, kv_dtype, state),
        "logits_bytes": cost.logits_bytes(spec, Pass(tokens=seq, batch=batch, width=width)),
        "activations": _activations(spec, replace(run, width=width), activation_dtype(dtype)),
        "decode": _decode(spec, seq, batch, held, kv_dtype, state) | {"dtype": cost.format_name(dtype)}
        if spec.decodes
        else None,
        "rows": [_row(row) for row in cost.rows(spec, run, kv_dtype)],
        "shapes": [
            _shapes(stack, block, where, seq, path) for stack, path in _stacks(spec) for block, where in distinct(stack)
        ],
        "conventions": CONVENTIONS,
    }


def _require_images(spec: Model, seq: int, images: int, sounds: int) -> None:
    """Raises InputError for images or sounds that the model does not read, or that take more tokens than the text."""
    if images and not ({"tokens", "images"}.issubset(spec.reads) or spec.image_tokens):
        raise InputError("this model does not read images beside a text", field="images", value=images, allowed="0")
    if sounds and not {"images", "audio"}.issubset(spec.reads):
        fix = "count them as --images" if spec.heard is not None else ""
        raise InputError("this model hears none beside images", field="sounds", value=sounds, allowed="0", fix=fix)
    heard = sounds * (0 if spec.heard is None else spec.heard.n_tokens)
    for field, value, taken in (("images", images, images * spec.image_tokens + heard), ("sounds", sounds, heard)):
        if value and taken > seq:
            raise InputError(
                f"the {field} take {taken} tokens",
                field=field,
                value=value,
                allowed=f"few enough to fit in {seq} tokens",
                fix="raise --seq",
            )


def _stored(source: Source) -> tuple[int | None, int | None]:
    """Returns the numbers and bytes stored in the file, after checking its names and shapes against the description."""
    if not source.has_weights:
        return None, None
    from asbuilt.checkpoint.load import Contents, stored_bytes, stored_parameters

    if _readable(source):
        Contents(source)  # weights that cannot be read can still be described
    return stored_parameters(source), stored_bytes(source)


def _readable(source: Source) -> bool:
    """Returns whether the weights are stored in a format that is read."""
    from asbuilt.checkpoint.load import headers, stored_only
    from asbuilt.checkpoint.quantised import holds_packed
    from asbuilt.families import reads_packed

    packed = source.reading.quantization
    if source.gguf is not None:
        return all(tensor.type in GGUF_READABLE for tensor in source.gguf.tensors.values())
    if packed is None or not packs_weights(packed) or reads_packed(source.family, packed):
        return True
    try:
        return holds_packed(stored_only(headers(source)), packed)
    except InputError:
        return False


def _packed(source: Source) -> dict[str, Any] | None:
    """Returns the format and bytes of packed weights as a plan counts them, or why it cannot.

    None for a GGUF file, whose tensors are counted as stored.
    """
    if source.reading.quantization is None:
        return None
    from asbuilt.plan.devices import device  # most models need none of this
    from asbuilt.plan.placement import Placement
    from asbuilt.plan.quantised import published

    try:
        found = published(source.reading, source.gguf)
    except InputError as error:
        return {"format": None, "weight_bytes": None, "problem": str(error)}
    assert found is not None
    held = device(source.spec, Placement(), found).stages[0].folds.total_bytes
    return {"format": found.name, "weight_bytes": held, "problem": None}


def _weight_bytes(spec: Model) -> dict[str, int]:
    """Returns `cost.weight_bytes` for each format; equal weights are grouped, since blocks repeat them."""
    held = Counter(weight for _, weight, _ in weights(spec))
    formats = [cost.dtype(name) for name in WEIGHT_DTYPES]
    return {f.name: math.ceil(sum(n * f.nbytes(weight) for weight, n in held.items())) for f in formats}


def length(spec: Model, seq: int | None) -> int:
    """Returns the sequence length of a description: as given, else 1024 or the context; an image has its own."""
    if "tokens" not in spec.reads:
        return spec.max_positions
    return min(DEFAULT_SEQ, spec.max_positions) if seq is None else seq


def activation_dtype(dtype: str) -> str:
    """Returns the dtype of activations: weights of 8 bits or fewer are multiplied with bf16 activations."""
    name = cost.format_name(dtype)
    return name if name in TORCH_NAMES else "bf16"


def _flops(spec: Model, run: Pass) -> dict[str, int | float]:
    whole = cost.flops(spec, run)

    def per_token(flops: int) -> int | float:
        return cost.exact(Fraction(flops, run.rows))

    return {
        "seq": run.tokens,
        "forward_per_token": per_token(whole.forward),
        "forward_per_token_causal": per_token(whole.forward_causal),
        "training_per_token": per_token(whole.training),
        "products_per_token": per_token(whole.products),
        "scores_per_token": per_token(whole.scores),
        "scores_per_token_causal": per_token(whole.scores_causal),
    }


def _cache(spec: Model, seq: int, batch: int, dtype: str, state: str | None) -> dict[str, Any]:
    bill = cost.cache(spec, seq, dtype, state=state)
    return {
        "dtype": cost.cache_name(dtype),
        "bytes_per_token": bill.per_token,
        "bytes_per_token_unbounded": bill.unbounded,
        "window_bytes": bill.window,
        "fixed_bytes": bill.fixed,
        "bytes_per_source_token": bill.per_source_token,
        "bytes_per_token_expanded": bill.expanded,
        "bytes_at_seq": bill.at_seq,
        "bytes_at_seq_batch": bill.at_seq * batch,
    }


def _activations(spec: Model, run: Pass, dtype: str) -> dict[str, Any]:
    bill = cost.saved(spec, run)
    return {
        "dtype": dtype,
        "saved_bytes": bill.all,
        "checkpointed_bytes": bill.checkpointed,
        "largest_block_bytes": bill.block,
        "loss_bytes": bill.loss,
    }


def _decode(spec: Model, seq: int, batch: int, held: Held, kv_dtype: str, state: str | None) -> dict[str, Any]:
    """Returns the costs of the decode step that extends the sequences to `seq` tokens."""
    bill = cost.moved(spec, Pass(tokens=1, batch=batch, past=seq - 1), held, kv_dtype, state)
    weights = {kind: nbytes for kind, nbytes in bill.weights.items() if nbytes}
    return {
        "seq": seq,
        "batch": batch,
        "weight_bytes": weights,
        "lookup_bytes": bill.lookups,
        "cache_bytes": bill.cache,
        "total_bytes": bill.total,
    }


def _row(row: cost.Row) -> dict[str, Any]:
    return {
        "path": row.path,
        "part": row.part,
        "kind": row.kind,
        "parameters": row.parameters,
        "flops_per_token": row.flops_per_token,
        "cache_bytes_per_token": row.cache_bytes_per_token,
        "count": row.count,
    }


def distinct(spec: Model) -> list[tuple[Block, list[int]]]:
    """Returns one block of each that differ in costs, with the indices of its layers."""
    found: dict[Block, tuple[Block, list[int]]] = {}
    for i, block in enumerate(spec.blocks):
        found.setdefault(block.billed, (block, []))[1].append(i)
    return list(found.values())


def _stacks(spec: Model) -> list[tuple[Model, str]]:
    """Returns the encoder, if any, and the model itself, each with the path of its blocks."""
    return [*([(spec.prompted, "encoder.blocks")] if "source" in spec.reads else []), (spec, "blocks")]


def _shapes(spec: Model, block: Block, where: list[int], seq: int, path: str) -> dict[str, Any]:
    """Returns the shapes of one token's vector through a block, with `seq - 1` other tokens in its context."""
    steps = _steps(block, Pass(tokens=1, past=seq - 1), "", spec.d_model)
    return {"path": path, "blocks": where, "count": len(where), "seq": seq, "steps": list(steps)}


def _steps(part: Part, run: Pass, path: str, d_model: int) -> Iterator[dict[str, Any]]:
    """Yields the steps in order of computation: a part's children come between its weight products and its scores.

    A router comes first.
    """
    products = part.multiplies(run)
    first_scores = next((i for i, product in enumerate(products) if product.weight is None), len(products))
    inside = sorted(part.children(), key=lambda found: found[1].kind != "router")
    routers = sum(child.kind == "router" for _, child in inside)
    below = [
        _steps(child, part.child_run(name, run) or run, f"{path}.{name}" if path else name, d_model)
        for name, child in inside
    ]
    yield from chain.from_iterable(below[:routers])
    for product in products[:first_scores]:
        yield _product(path, product)
    yield from _whole(part, run, path)
    yield from chain.from_iterable(below[routers:])
    for product in products[first_scores:]:
        yield _product(path, product)
    if isinstance(part, Branch):
        yield _step(path, "residual add", [d_model], None, [d_model])


def _product(path: str, product: Product) -> dict[str, Any]:
    """Returns the step of a product (a,b)x(b,c), per head if there are several."""
    heads = [product.n] if product.n > 1 else []
    rows = [product.a] if product.a > 1 else []
    left, right = [*heads, *rows, product.b], [product.b, product.c]
    return _step(path, product.name, left, right, [*heads, *rows, product.c], product.flops)


def _whole(part: Part, run: Pass, path: str) -> Iterator[dict[str, Any]]:
    """Yields the steps of parts without products."""
    rows = [run.rows] if run.rows > 1 else []
    if isinstance(part, RMSNorm | LayerNorm):
        yield _step(path, type(part).__name__, [*rows, part.d], None, [*rows, part.d])
    elif isinstance(part, Rotary):
        yield _step(path, "RoPE applied to q and k", [part.d_rotary], None, [part.d_rotary])


def _step(
    path: str, step: str, left: list[int], right: list[int] | None, out: list[int], flops: int = 0
) -> dict[str, Any]:
    return {"path": path, "step": step, "input": left, "by": right, "output": out, "flops": flops}
