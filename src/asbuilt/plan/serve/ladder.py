"""The memory ladder: memory, reserve, weights, activations, logits, workspace, cache, tokens, users."""

from __future__ import annotations

import math
import re
from dataclasses import astuple
from fractions import Fraction

from asbuilt.cost.folded import CacheNumbers
from asbuilt.plan.devices import DeviceStage
from asbuilt.plan.lines import Line, total
from asbuilt.plan.serve.adapters import Adapters
from asbuilt.plan.serve.capacity import ADAPTERS, Capacity
from asbuilt.plan.serve.conventions import MEANING, SAMPLER_BYTES, UTILISATION
from asbuilt.spec.part import CacheFormat

DECLARED = "declared by the parts"


def ladder(capacity: Capacity, context: int, users: int) -> tuple[Line, ...]:
    """Returns the lines from device memory to cache for a device of the tightest stage, with `users` in its group."""
    stage = capacity.tightest(context)
    spent = capacity.spent(stage, context)
    lines = [_memory(capacity), _reserve(capacity, spent), _weights(capacity, stage)]
    if capacity.adapters is not None:
        lines.append(_adapters(capacity, stage, capacity.adapters))
    if capacity.conventions.overhead is not None:
        overhead = math.ceil(capacity.conventions.overhead)
        lines.append(
            Line(
                name="overhead",
                value=overhead,
                formula="{given}",
                numbers={"given": overhead},
                source="given: one figure for activations, logits and workspace",
            )
        )
    elif capacity.engine.profiled:
        lines += [_buffers(capacity, stage), _profiled(capacity, stage, context), _outside(capacity, spent)]
    else:
        lines += [_activations(capacity, context), _logits(capacity, stage, users), _workspace(capacity)]
    numbers = {line.name: line.value for line in lines}
    names = [*numbers]
    formula = f"{{{names[0]}}}" + "".join(f" − {{{name}}}" for name in names[1:])
    left = numbers[names[0]] - sum(numbers[name] for name in names[1:])
    note = "" if left >= 0 else "negative: it does not fit"
    return (*lines, Line(name="cache budget", value=left, formula=formula, numbers=numbers, note=note))


def _memory(capacity: Capacity) -> Line:
    machine, convention = capacity.machine, capacity.conventions.memory
    source = machine.source
    if convention == "process" and machine.process_gib is not None:
        formula, numbers = "floor({GiB a process gets} × {bytes in a GiB})", {"GiB a process gets": machine.process_gib}
        numbers["bytes in a GiB"], source = 2**30, machine.process_source
    elif convention in ("process", "reported") and machine.reported_gib is not None:
        formula, numbers = "floor({reported GiB} × {bytes in a GiB})", {"reported GiB": machine.reported_gib}
        numbers["bytes in a GiB"] = 2**30
    else:
        unit = 2**30 if convention == "binary" else 10**9
        formula, numbers = "floor({vendor's number} × {bytes})", {"vendor's number": machine.memory_gb, "bytes": unit}
    note = f"{machine.memory_gb:g} GB by the vendor"
    if machine.reported_gib is not None:
        note += f", {machine.reported_gib:.2f} GiB reported by the driver"
    return Line(name="device memory", value=capacity.memory, formula=formula, numbers=numbers, source=source, note=note)


def _reserve(capacity: Capacity, spent: dict[str, int]) -> Line:
    c, engine = capacity.conventions, capacity.engine
    of = {
        "total": {},
        "free": {name: spent[name] for name in ("outside PyTorch",) if name in spent},
        "left": {name: nbytes for name, nbytes in spent.items() if name != "reserve"},
    }[engine.base if c.overhead is None else "total"]
    numbers = {"device memory": capacity.memory, **of}
    room = " − ".join(f"{{{name}}}" for name in numbers)
    usual = "an assumption, the default of engines" if c.utilisation == UTILISATION else "given"
    own = usual if "utilisation" in capacity.given.conventions else engine.sources.get("utilisation", usual)
    return Line(
        name="reserve",
        value=spent["reserve"],
        formula=f"ceil(max(0, {room}) × (1 − {{utilisation}}) + {{kept free}})"
        if of
        else "ceil({device memory} × (1 − {utilisation}) + {kept free})",
        numbers=numbers | {"utilisation": c.utilisation, "kept free": c.reserve},
        source=f"utilisation: {own}",
        note="" if engine.counts_activations else "activations and graphs come from it",
    )


def _buffers(capacity: Capacity, stage: DeviceStage) -> Line:
    return total("buffers", capacity.buffers(stage), source=_sources(capacity, "tables", "vocabulary", "multiples"))


def _sources(capacity: Capacity, *names: str) -> str:
    found = capacity.engine.sources
    return "; ".join(found[name] for name in names if name in found)


def _profiled(capacity: Capacity, stage: DeviceStage, context: int) -> Line:
    """Returns the activations as the engine profiles them, 0 if it leaves them to the reserve."""
    engine, p = capacity.engine, capacity.profiled(stage, context)
    if not engine.counts_activations:
        note = f"about {p.nbytes / 2**30:.2f} GiB, from the reserve"
        return Line(name="activations", value=0, formula="0", source=engine.sources["activations"], note=note)
    sequences = capacity.chunk if engine.samples == "chunk" else min(capacity.sequences or 1, capacity.chunk)
    bigger = "the sampler's are larger" if p.sampling > p.forward else "the chunk's are larger"
    return Line(
        name="activations",
        value=p.nbytes,
        formula="max({busiest moment of a chunk}, {hidden states} + {sampler} + {workspaces of experts})"
        " + {from the stage before} + {library}",
        numbers={
            "busiest moment of a chunk": p.forward,
            "hidden states": p.hidden,
            "sampler": p.sampler,
            "workspaces of experts": p.workspace,
            "from the stage before": p.incoming,
            "library": p.library,
        },
        source=_sources(capacity, "activations", "sampler", "library"),
        note=f"chunks of {capacity.chunk:,} tokens, {sequences:,} sequences sampled at once: {bigger}",
    )


def _outside(capacity: Capacity, spent: dict[str, int]) -> Line:
    given = capacity.conventions.workspace is not None
    value = spent["outside PyTorch"]
    source = "given" if given else _sources(capacity, "outside", *(("joined",) if capacity.layout.wide > 1 else ()))
    return Line(name="outside PyTorch", value=value, formula="{allowance}", numbers={"allowance": value}, source=source)


def _weights(capacity: Capacity, stage: DeviceStage) -> Line:
    parts = {f"{kind} weights": nbytes for kind, nbytes in stage.folds.weight_bytes.items() if nbytes}
    formula = " + ".join(f"{{{name}}}" for name in parts) or "0"
    layout, note = capacity.layout, capacity.precision.note
    if layout.per_copy > 1:
        whose = f"one device of tp {layout.tp}, pp {layout.pp}, ep {layout.ep}"
        note = f"{whose}; {note}" if note else whose
    return Line(
        name="weights",
        value=sum(parts.values()),
        formula=formula,
        numbers=parts,
        note=note,
        source=f"{DECLARED}, in {capacity.precision.name}",
    )


def _adapters(capacity: Capacity, stage: DeviceStage, adapters: Adapters) -> Line:
    each = sum(capacity.one_adapter(stage).values())
    return Line(
        name=ADAPTERS,
        value=adapters.count * each,
        formula="{adapters} × {bytes of one}",
        numbers={"adapters": adapters.count, "bytes of one": each},
        source=f"{DECLARED}: A and B of rank {adapters.rank} in {capacity.precision.activation}",
    )


def _activations(capacity: Capacity, context: int) -> Line:
    """Returns the line, which names the kernel: one that stores scores needs many times the memory of a fused one."""
    busiest, tokens = capacity.activations(context), min(capacity.chunk, context)
    after = f" after {context - tokens:,}" if context > tokens else ""
    kernel = MEANING["kernel"][capacity.conventions.kernel]
    return Line(
        name="activations",
        value=busiest,
        formula="{busiest moment of a chunk}",
        numbers={"busiest moment of a chunk": busiest},
        source=f"{DECLARED}; {kernel}",
        note=f"prefilling {tokens:,} tokens at once{after}, in {capacity.precision.activation}",
    )


def _logits(capacity: Capacity, stage: DeviceStage, users: int) -> Line:
    each = capacity.scratch(stage)
    per_token = capacity.precision.width + SAMPLER_BYTES
    numbers = {"sequences": users, "vocabulary": each // per_token, "bytes": per_token}
    return Line(
        name="logits and sampler",
        value=users * each,
        formula="{sequences} × {vocabulary} × {bytes}",
        numbers=numbers,
        source="bytes: logits in the activations' dtype, a float32 copy, probabilities; an assumption",
    )


def _workspace(capacity: Capacity) -> Line:
    given = capacity.conventions.workspace is not None
    return Line(
        name="graphs and workspace",
        value=capacity.workspace,
        formula="{allowance}",
        numbers={"allowance": capacity.workspace},
        source="given" if given else "an assumption",
    )


def counted(capacity: Capacity, context: int, budget: int, users: int) -> tuple[Line, ...]:
    """Returns the lines from the cache budget to tokens and users."""
    stage, c = capacity.tightest(context), capacity.conventions
    cache, scratch = capacity.per_user(stage, context), capacity.scratch(stage)
    shared = capacity.shared(stage, context)
    if shared is None:
        formula, size = _cached(capacity.numbers(stage, context), capacity.kv_bytes)
    else:
        formula = "{pages} × {layers of a group} × {tokens of a page} × {bytes of a token and layer}"
        size = dict(zip(re.findall(r"{(.+?)}", formula), astuple(shared), strict=True))
    paged = f"pages of {c.block_size if shared is None else shared.tokens:,} tokens" if c.page else "no pages"
    paged += "" if shared is None else ", one for each group of layers that keep a state"
    lines = [
        Line(
            name="cache per user",
            value=cache,
            formula=f"ceil({formula})",
            numbers=size,
            source=f"{DECLARED}, in {capacity.kv_dtype}",
            note=f"{context:,} tokens, {paged}",
        )
    ]
    if cache:
        lines.append(
            Line(
                name="cache tokens",
                value=cached_tokens(capacity, stage, context, budget),
                unit="tokens",
                formula="floor(max(0, {cache budget}) × {context} / {cache per user})",
                numbers={"cache budget": budget, "context": context, "cache per user": cache},
            )
        )
    left = capacity.memory - capacity.fixed(stage, context)
    many, host = capacity.layout.replicas, capacity.host
    if cache or scratch:
        half = 0.5 if c.count == "nearest" else 0
        lines.append(
            Line(
                name="users that fit",
                value=users,
                unit="users at this context",
                formula="floor(max(0, {room for users}) / ({cache per user} + {logits per user})"
                " + {rounding}) × {groups}"
                if host is None
                else "min(floor(max(0, {room for users}) / ({cache per user} + {logits per user})"
                " + {rounding}), {users in host memory}) × {groups}",
                numbers={
                    "room for users": left,
                    "cache per user": cache,
                    "logits per user": scratch,
                    "rounding": half,
                    "groups": many,
                }
                | ({} if host is None else {"users in host memory": min(capacity.in_host(context), users)}),
                note="room for users: the cache budget before any user's logits are subtracted",
            )
        )
    return tuple(lines)


def _cached(numbers: CacheNumbers, held: Fraction | int | CacheFormat) -> tuple[str, dict[str, float]]:
    """Returns the formula of a sequence's cache bytes and its numbers: by width of vectors, if these have scales."""
    own = held.state if isinstance(held, CacheFormat) else held
    if isinstance(held, CacheFormat):
        terms = [
            (f"vectors of {width}", count, f"bytes of a vector of {width}", held.vector_bytes(width))
            for width, count in numbers.vectors
        ]
        terms += [("numbers of states", numbers.states, "bytes of one of a state", own)] if numbers.states else []
    else:
        terms = [("cached numbers", numbers.cached, "bytes", held)]
    if numbers.float32:
        terms.append(("float32 numbers", numbers.float32, "bytes of one", max(4, own)))
    formula = " + ".join(f"{{{name}}} × {{{size}}}" for name, _, size, _ in terms)
    said = {name: count for name, count, _, _ in terms} | {size: float(each) for _, _, size, each in terms}
    return formula or "0", said


def cached_tokens(capacity: Capacity, stage: DeviceStage, context: int, budget: int) -> int:
    """Returns how many tokens fit in the cache budget, in sequences of `context` tokens."""
    each = capacity.per_user(stage, context)
    return max(0, budget) * context // each if each else 0
