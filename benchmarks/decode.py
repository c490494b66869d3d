"""Decode and prefill compared with transformers: same weights, one run, alternating, medians of ratios.

Batch 1, 128 tokens in and 128 out, then a prefill of 512, in bfloat16 on SmolLM2-135M-Instruct from its GGUF file.
A decode step is bound by reading every weight once, a prefill by the matrix rate; the achieved fractions of both are
printed. Run it on an otherwise idle machine: `make bench`.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from asbuilt import cost
from asbuilt.checkpoint.load import load
from asbuilt.generate.decode import generate
from asbuilt.measure.calibrate import calibrate
from asbuilt.nn.model import Model
from asbuilt.spec import Pass

IN, OUT, PREFILL = 128, 128, 512


def locate() -> Path:
    """Returns the path of the GGUF file, without importing the package that contains it."""
    script = Path(__file__).parent.parent / "demo" / "find_smollm2.py"
    return Path(subprocess.run([sys.executable, script], check=True, capture_output=True, text=True).stdout.strip())


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Ours:
    def __init__(self, path: Path) -> None:
        self.model: Model = load(path, dtype=torch.bfloat16)

    def tokens(self, ids: list[int], new: int) -> list[int | None]:
        return [step[0] for step in generate(self.model, [ids], max_new_tokens=new)]

    def prefill(self, ids: list[int]) -> None:
        with torch.inference_mode():
            self.tokens(ids, 1)


class Theirs:
    def __init__(self, path: Path, attention: str) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.bfloat16, attn_implementation=attention
        ).eval()

    def tokens(self, ids: list[int], new: int) -> list[int]:
        given = torch.tensor([ids])
        with torch.inference_mode():
            out = self.model.generate(
                given,
                attention_mask=torch.ones_like(given),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
                pad_token_id=0,
            )
        return out[0, len(ids) :].tolist()

    def prefill(self, ids: list[int]) -> None:
        with torch.inference_mode():
            self.model(torch.tensor([ids]), use_cache=True, logits_to_keep=1)


def decode_rate(side: Ours | Theirs, ids: list[int]) -> float:
    """Returns the tokens per second of the OUT-1 steps after the first token."""
    first = timed(lambda: side.tokens(ids, 1))
    return (OUT - 1) / (timed(lambda: side.tokens(ids, OUT)) - first)


def prefill_rate(side: Ours | Theirs, ids: list[int]) -> float:
    return PREFILL / timed(lambda: side.prefill(ids))


def rounds(count: int, work: Callable[[Ours | Theirs], float], sides: list[Ours | Theirs]) -> list[list[float]]:
    for side in sides:
        work(side)  # not counted
    return [[work(side) for side in sides] for _ in range(count)]


@contextmanager
def quiet() -> Iterator[None]:
    import logging

    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("asbuilt").setLevel(logging.ERROR)
    yield


def show(what: str, measured: list[list[float]], names: list[str]) -> list[float]:
    medians = [statistics.median(column) for column in zip(*measured, strict=True)]
    for name, rate in zip(names, medians, strict=True):
        print(f"  {what:8} {name:24} {rate:8.1f} tokens/s")
    for i, name in enumerate(names[1:], 1):
        ratios = [row[0] / row[i] for row in measured]
        print(f"  {what:8} asbuilt / {name}: {statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})")
    return medians


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=5)
    count = arguments.parse_args().rounds
    path = locate()
    with quiet():
        ours = Ours(path)
        sides: list[Ours | Theirs] = [ours, Theirs(path, "eager"), Theirs(path, "sdpa")]
    names = ["asbuilt", "transformers eager", "transformers sdpa"]
    machine = calibrate()
    ids = torch.randint(1000, 20_000, (PREFILL,), generator=torch.Generator().manual_seed(0)).tolist()
    print(
        f"{machine.machine['processor']}, {machine.machine['threads']} threads, torch {machine.machine['torch']}, bf16"
    )

    rate = show("decode", rounds(count, lambda side: decode_rate(side, ids[:IN]), sides), names)[0]
    spec = ours.model.spec
    moved = cost.moved(spec, Pass(tokens=1, past=IN + OUT // 2, logits="last"), "bf16", "bf16").total
    read = moved * rate
    share = read / machine.read_bandwidth
    vector = machine.rates["bf16"].row_rate
    print(f"  {moved / 1e6:.0f} MB per step: {read / 1e9:.1f} GB/s, {share:.0%} of the read bandwidth")
    print(f"  and {read / vector:.0%} of what the library's bf16 matrix-vector product reads ({vector / 1e9:.1f} GB/s)")

    rate = show("prefill", rounds(count, lambda side: prefill_rate(side, ids), sides), names)[0]
    flops = cost.flops(spec, Pass(tokens=PREFILL, logits="last")).forward_causal / PREFILL
    done, matrix = flops * rate, machine.rates["bf16"].product_rate
    print(f"  {flops / 1e6:.0f} MFLOP per token: {done / 1e9:.0f} GFLOP/s, {done / matrix:.0%} of the matrix rate")


if __name__ == "__main__":
    main()
