"""Predicted and measured figures of models that fit a small machine; prints the tables of docs/plan.md.

    python benchmarks/predictions.py             # all, about ten minutes; on an idle machine, since speeds are timed
    python benchmarks/predictions.py --counted   # bytes and FLOPs only: nothing is timed

SmolLM2-135M, and random weights of five other families: no figure depends on the weights. Weights, cache and the peak
of prefill are those of `asbuilt.plan.serve`; speeds are predicted from a calibration just before, which never sees the
model. Of three rounds, the one with the median difference is shown. The last column is the measured share of the plan's
maximum speed (bytes over bandwidth, FLOPs over rate).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch

from asbuilt import catalog, measure, plan
from asbuilt.catalog import machines
from asbuilt.catalog.machine import Machine
from asbuilt.families import gemma, gpt2, gpt_neox, mixtral, qwen3
from asbuilt.families.shared.dimensions import Sizes
from asbuilt.measure.report import PREFILL, PROMPT, Row
from asbuilt.nn import build
from asbuilt.nn.model import Model as Built
from asbuilt.spec import Model, Rotary, Router

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
CONTEXT = 1024
ROUNDS = 3


def sizes(name: str) -> Sizes:
    return Sizes(
        n_vocab=16384,
        d_model=512,
        n_layers=8,
        n_heads=8,
        n_kv_heads=4,
        d_ff=1408,
        max_positions=CONTEXT,
        rotary=Rotary(d_rotary=64),
        name=name,
    )


def a_gpt2() -> Model:
    return gpt2.build(n_vocab=16384, d_model=640, n_layers=10, n_heads=10, max_positions=CONTEXT, name="gpt2-like")


def a_gpt_neox() -> Model:
    return gpt_neox.FAMILY.build(
        n_vocab=16384,
        d_model=512,
        n_layers=8,
        n_heads=8,
        d_ff=2048,
        max_positions=CONTEXT,
        d_head=64,
        rotary=Rotary(d_rotary=16),
        name="gpt-neox-like",
    )


def a_gemma3() -> Model:
    """Returns a model with windows of 128 on five of six layers, and norms before and after each branch."""
    return gemma.build(
        n_vocab=16384,
        d_model=512,
        n_layers=12,
        n_heads=8,
        n_kv_heads=4,
        d_head=64,
        d_ff=1408,
        max_positions=CONTEXT,
        rotary=Rotary(d_rotary=64),
        windows=[None if i % 6 == 5 else 128 for i in range(12)],
        sandwich=True,
        head_norms=True,
        name="gemma3-like",
    )


def a_mixtral() -> Model:
    router = Router(d_model=512, n_experts=8, top_k=2, renormalise=True)
    return mixtral.FAMILY.build(router=router, **sizes("mixtral-like"))


def a_qwen3() -> Model:
    return qwen3.FAMILY.build(eps=1e-6, **sizes("qwen3-like"))


MODELS: tuple[Callable[[], Model], ...] = (
    lambda: catalog.find("smollm2-135m").spec(),
    a_gpt2,
    a_gpt_neox,
    a_gemma3,
    a_qwen3,
    a_mixtral,
)


def planned(spec: Model, dtype: str, machine: Machine) -> dict[str, float]:
    """Returns the plan's figures by `measure`'s names."""
    tokens = min(PREFILL, spec.max_positions)
    ours = plan.Conventions(kernel="library")  # nothing here runs an engine
    made = plan.serve(
        spec, machine, dtype=dtype, context=tokens, chunk=tokens, prompt=tokens, users=1, conventions=ours
    )
    lines = {line.name: line.value for line in made.ladder}
    assert made.caches is not None
    return {
        f"weights, {dtype}": made.weight_bytes,
        f"cache, {tokens} tokens": made.caches.minimum,
        f"peak memory of prefill, {tokens} tokens": made.weight_bytes + made.caches.minimum + lines["activations"],
    }


def floors(spec: Model, dtype: str, machine: Machine) -> dict[str, float]:
    """Returns the plan's theoretical maximum of tokens/s."""
    tokens = min(PREFILL, spec.max_positions)
    prefill = plan.serve(spec, machine, dtype=dtype, context=tokens, chunk=tokens, prompt=tokens).prefill
    decode = plan.serve(spec, machine, dtype=dtype, context=PROMPT + 32, users=1).decode
    assert decode is not None
    return {
        f"prefill, {tokens} tokens": tokens / prefill.seconds,
        f"decode after {PROMPT} tokens": decode.tokens_per_second,
    }


def timed(model: Built) -> list[Row]:
    """Returns all rows, each of the round with the median difference, since other processes may disturb one."""
    rounds = [measure.measure(model, refresh=True).rows for _ in range(ROUNDS)]
    return [sorted(same, key=lambda row: row.error)[ROUNDS // 2] for same in zip(*rounds, strict=True)]


def rows(dtype: str, counted: bool) -> Iterator[tuple[str, ...]]:
    for make in MODELS:
        spec = make()
        model = build(spec, dtype=DTYPES[dtype]).eval()
        found = measure.counted(model) if counted else timed(model)
        machine = machines.find("cpu-2core") if counted else measure.this_machine()
        said, floor = planned(spec, dtype, machine), floors(spec, dtype, machine)
        for row in found:
            assert said.get(row.figure, row.predicted) == row.predicted, (row.figure, said[row.figure], row.predicted)
            reached = f"{row.measured / floor[row.figure]:.0%}" if row.figure in floor and not counted else ""
            error = "0" if row.predicted == row.measured else f"{row.error:+.2%}"
            allowed = f"within {row.tolerance:.0%}" if row.tolerance else "exact"
            yield (
                spec.name,
                dtype,
                row.figure,
                f"{row.predicted:,.4g}" if row.timed else f"{row.predicted:,}",
                f"{row.measured:,.4g}" if row.timed else f"{row.measured:,}",
                error,
                allowed if row.ok else f"MISSED: {allowed}",
                reached,
            )


def main() -> None:
    counted = "--counted" in sys.argv[1:]
    print("| model | dtype | figure | predicted | measured | difference | | of the maximum |")
    print("|---|---|---|---:|---:|---:|---|---:|")
    missed = False
    for dtype in DTYPES:
        for row in rows(dtype, counted):
            missed = missed or row[6].startswith("MISSED")
            print("| " + " | ".join(row) + " |", flush=True)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
