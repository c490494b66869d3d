"""What `describe` says of a model, as plain data: the keys of its JSON document, which only ever get more."""

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
from asbuilt.dtypes import BLOCKS, GGUF_READABLE, PLAIN, TORCH_NAMES
from asbuilt.errors import InputError
from asbuilt.families.shared.packing import block_scales, holding
from asbuilt.spec import Block, Branch, LayerNorm, Model, Part, Pass, Product, RMSNorm, Rotary, Vision, weights

if TYPE_CHECKING:
    from asbuilt.checkpoint.source import Source

WEIGHT_DTYPES = ("fp32", "bf16", "fp8", "int8", "int4", *BLOCKS)
DEFAULT_SEQ = 1024
CONVENTIONS = {
    "flops": "a product (a,b)x(b,c) is 2abc FLOPs; training is forward with full scores, and twice that backward",
    "scores": "scores and mixing with every key, masked ones too; forward_per_token_causal leaves masked pairs out",
    "lookup": "looking up an embedding multiplies nothing; its table counts among the parameters",
    "units": "1 GB = 10^9 bytes, 1 GiB = 2^30 bytes",
    "parameters": "as built: tied tensors once; active: what one token uses; parameters_stored: as the file holds them",
    "defaults": "sizes that config.json does not say, as transformers' class has them",
    "notes": "keys of config.json that transformers does not read, and other programs do",
    "active_parameters": "of experts those that a token is sent to; with the input tables, whole, or without those of "
    "which a token looks up a row and multiplies none, as many model cards count",
    "quantization": "how config.json, or hf_quant_config.json beside it, says that the weights are packed; a stored "
    "byte then counts as one number; packed: what `plan serve` makes of that",
    "stored_extra": "held by a checkpoint beside the parameters as built: buffers, which no training step moves, and "
    "layers that predict tokens further on, which no pass runs; scales: of 8-bit weights, where config.json says so; "
    "less positions that are computed and not stored",
    "encoder": "reads as many tokens as the sequence has, before its first one; FLOPs per token are of both stacks, "
    "divided by the decoder's tokens; cache bytes_per_source_token is for each token that it read",
    "cache": "the semantic minimum, and the bytes of the cache object that generation allocates; of one sequence; "
    "expanded: if every head's keys and values were kept, not the latents that hold them",
    "weights": "in block formats vectors stay fp32, as in GGUF files; stored_bytes is what the file holds",
    "activations": "kept by one training forward pass with fused attention; weights and gradients not counted",
    "pooler": "where there is one its product, once per sequence and only if asked for, is in no figure of FLOPs",
    "decode": "one step of one token per sequence; weights read once, the cache read and written, activations left "
    "out; none where tokens see those after them",
}


def describe(source: Source, *, seq: int, batch: int, dtype: str, kv_dtype: str, images: int = 0) -> dict[str, Any]:
    """Returns the whole bill of a model at `batch` sequences of `seq` tokens, with so many images in each.

    Raises InputError for a dtype that is none, for stored tensors that are not those of the description, and for images
    that the model does not see or that do not go into the text.
    """
    spec = source.spec
    _require_images(spec, seq, images)
    run = Pass(tokens=seq, batch=batch, images=images)
    width = int(PLAIN[activation_dtype(dtype)])
    counts = cost.parameters(spec)
    total, active = sum(counts.values()), cost.active_parameters(spec)
    extra = cost.stored_extra(spec) | {"scales": block_scales(source.family, spec, source.reading.quantization)}
    stored, stored_bytes = _stored(source)
    held = holding(source.family, spec, dtype)
    return {
        "name": source.name,
        "family": source.family,
        "context": spec.max_positions,
        "seq": seq,
        "batch": batch,
        "dtype": cost.format_name(dtype),
        "images": images,
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
        "cache": _cache(spec, seq, batch, kv_dtype),
        "logits_bytes": cost.logits_bytes(spec, Pass(tokens=seq, batch=batch, width=width)),
        "activations": _activations(spec, replace(run, width=width), activation_dtype(dtype)),
        "decode": _decode(spec, seq, batch, held, kv_dtype) | {"dtype": cost.format_name(dtype)}
        if spec.decodes
        else None,
        "rows": [_row(row) for row in cost.rows(spec, run, kv_dtype)],
        "shapes": [
            _shapes(stack, block, where, seq, path) for stack, path in _stacks(spec) for block, where in distinct(stack)
        ],
        "conventions": CONVENTIONS,
    }


def _require_images(spec: Model, seq: int, images: int) -> None:
    """Raises InputError for images that the model does not see, or whose tokens are more than the text has."""
    if images and spec.vision is None:
        raise InputError("this model sees no images beside a text", field="images", value=images, allowed="0")
    taken = images * spec.vision.n_tokens if isinstance(spec.vision, Vision) else 0
    if taken > seq:
        raise InputError(
            f"these images take {taken} tokens",
            field="images",
            value=images,
            allowed=f"what {seq} tokens hold",
            fix="raise --seq",
        )


def _stored(source: Source) -> tuple[int | None, int | None]:
    """Returns numbers and bytes that the file holds, having held its names and shapes against the description."""
    if not source.has_weights:
        return None, None
    from asbuilt.checkpoint.load import Contents, stored_bytes, stored_parameters
    from asbuilt.families import reads_packed

    packed = source.reading.quantization
    if source.gguf is not None:
        readable = all(tensor.type in GGUF_READABLE for tensor in source.gguf.tensors.values())
    else:
        readable = packed is None or reads_packed(source.family, packed)
    if readable:
        Contents(source)  # what cannot be read can still be described
    return stored_parameters(source), stored_bytes(source)


def _packed(source: Source) -> dict[str, Any] | None:
    """What is made of packed weights: their format and bytes as a plan counts them, or why it cannot.

    Nothing of a GGUF file: what that holds is counted as stored.
    """
    if source.reading.quantization is None:
        return None
    from asbuilt.plan.devices import device  # most models need none of this
    from asbuilt.plan.placement import Placement
    from asbuilt.plan.quantised import published

    try:
        found = published(source)
    except InputError as error:
        return {"format": None, "weight_bytes": None, "problem": str(error)}
    assert found is not None
    held = device(source.spec, Placement(), found).stages[0].folds.total_bytes
    return {"format": found.name, "weight_bytes": held, "problem": None}


def _weight_bytes(spec: Model) -> dict[str, int]:
    """As `cost.weight_bytes` for each format; equal weights are counted first, since the blocks repeat them."""
    held = Counter(weight for _, weight, _ in weights(spec))
    formats = [cost.dtype(name) for name in WEIGHT_DTYPES]
    return {f.name: math.ceil(sum(n * f.nbytes(weight) for weight, n in held.items())) for f in formats}


def length(spec: Model, seq: int | None) -> int:
    """Returns how many tokens a description is for: those asked for, else 1024 or the context; an image has its own."""
    if spec.n_vocab == 0:
        return spec.max_positions
    return min(DEFAULT_SEQ, spec.max_positions) if seq is None else seq


def activation_dtype(dtype: str) -> str:
    """Returns the dtype of activations: weights in 8 bits or fewer still multiply activations in bf16."""
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


def _cache(spec: Model, seq: int, batch: int, dtype: str) -> dict[str, Any]:
    bill = cost.cache(spec, seq, dtype)
    return {
        "dtype": cost.dtype(dtype).name,
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


def _decode(spec: Model, seq: int, batch: int, held: Held, kv_dtype: str) -> dict[str, Any]:
    """The step that makes the sequences `seq` tokens long."""
    bill = cost.moved(spec, Pass(tokens=1, batch=batch, past=seq - 1), held, kv_dtype)
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
    """Returns each kind of block once, with the numbers of the layers that are of this kind."""
    found: dict[Block, list[int]] = {}
    for i, block in enumerate(spec.blocks):
        found.setdefault(block, []).append(i)
    return list(found.items())


def _stacks(spec: Model) -> list[tuple[Model, str]]:
    """Returns the encoder, where there is one, and the model itself, each with the path of its blocks."""
    return [*([] if spec.encoder is None else [(spec.encoder, "encoder.blocks")]), (spec, "blocks")]


def _shapes(spec: Model, block: Block, where: list[int], seq: int, path: str) -> dict[str, Any]:
    """The way of one token's vector through a block, `seq - 1` others being cached, or read at once by an encoder."""
    steps = _steps(block, Pass(tokens=1, past=seq - 1), "", spec.d_model)
    return {"path": path, "blocks": where, "count": len(where), "seq": seq, "steps": list(steps)}


def _steps(part: Part, run: Pass, path: str, d_model: int) -> Iterator[dict[str, Any]]:
    """In the order of the data: what lies inside a part comes between its products with weights and its scores.

    But a router comes first.
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
        yield _step(path, "added to the stream", [d_model], None, [d_model])


def _product(path: str, product: Product) -> dict[str, Any]:
    """(a,b)x(b,c), once per head where there are several."""
    heads = [product.n] if product.n > 1 else []
    rows = [product.a] if product.a > 1 else []
    left, right = [*heads, *rows, product.b], [product.b, product.c]
    return _step(path, product.name, left, right, [*heads, *rows, product.c], product.flops)


def _whole(part: Part, run: Pass, path: str) -> Iterator[dict[str, Any]]:
    """Parts that change numbers and multiply nothing."""
    rows = [run.rows] if run.rows > 1 else []
    if isinstance(part, RMSNorm | LayerNorm):
        yield _step(path, type(part).__name__, [*rows, part.d], None, [*rows, part.d])
    elif isinstance(part, Rotary):
        yield _step(path, "turns queries and keys", [part.d_rotary], None, [part.d_rotary])


def _step(
    path: str, step: str, left: list[int], right: list[int] | None, out: list[int], flops: int = 0
) -> dict[str, Any]:
    return {"path": path, "step": step, "input": left, "by": right, "output": out, "flops": flops}
