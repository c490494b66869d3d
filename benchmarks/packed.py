"""Packed weights beside llama.cpp (the wheel xllamacpp): decode and prefill of one GGUF file, in turn, in one run.

Ours keeps the file's blocks and multiplies them with the native kernels (`asbuilt[native]`); both use the same threads,
tokens and file, with a cache in float32 (ours) and float16 (llama.cpp's usual). Medians of rounds, and of their ratios.
Run it on an otherwise idle machine: `python benchmarks/packed.py [FILE.gguf]`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from asbuilt.checkpoint.load import load
from asbuilt.generate.decode import generate
from asbuilt.kernels import native
from asbuilt.measure.calibrate import calibrate
from asbuilt.nn.build import interleave

DEFAULT_IN, DEFAULT_OUT, PREFILL = 64, 64, 512


def locate() -> Path:
    """Returns the path of SmolLM2's GGUF file, without importing the package that contains it."""
    script = Path(__file__).parent.parent / "demo" / "find_smollm2.py"
    return Path(subprocess.run([sys.executable, script], check=True, capture_output=True, text=True).stdout.strip())


class Ours:
    def __init__(self, path: Path) -> None:
        self.model = load(path, torch.float32, packed=True)
        self.interleaved = interleave(self.model)

    def seconds(self, ids: list[int], new: int) -> tuple[float, float]:
        """Returns the seconds of the prefill with its token, and of each further token."""
        start = time.perf_counter()
        steps = generate(self.model, [ids], max_new_tokens=new, eos_ids=())
        next(steps)
        middle = time.perf_counter()
        count = sum(1 for _ in steps)
        return middle - start, (time.perf_counter() - middle) / max(1, count)


class Theirs:
    def __init__(self, path: Path, threads: int) -> None:
        x: Any = import_module("xllamacpp")
        params = x.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel, params.n_gpu_layers = 4096, 1, 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        self.server = x.Server(params)

    def seconds(self, ids: list[int], new: int) -> tuple[float, float]:
        """Returns the same, as llama.cpp states them."""
        ask = {"prompt": ids, "n_predict": new, "temperature": 0.0, "cache_prompt": False, "ignore_eos": True}
        answer = self.server.handle_completions(ask)
        answer = json.loads(answer) if isinstance(answer, str) else answer
        timings = answer["timings"]
        return timings["prompt_ms"] / 1e3, timings["predicted_per_token_ms"] / 1e3


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("file", nargs="?", type=Path)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--threads", type=int, default=torch.get_num_threads())
    asked = arguments.parse_args()
    torch.set_num_threads(asked.threads)
    path = asked.file or locate()
    ours, theirs = Ours(path), Theirs(path, asked.threads)
    print(f"{path.name}: {ours.interleaved} matrices interleaved, {native.instructions()}, {asked.threads} threads")
    ids = [int(i) for i in torch.randint(1000, 2000, (PREFILL,), generator=torch.Generator().manual_seed(0))]
    for what, prompt, new, which in (
        ("decode", ids[:DEFAULT_IN], DEFAULT_OUT, 1),
        (f"prefill {PREFILL}", ids, 2, 0),
    ):
        rounds = [[side.seconds(prompt, new)[which] for side in (ours, theirs)] for _ in range(asked.rounds + 1)][1:]
        count = 1 if which else len(prompt)
        mine, peer = (statistics.median(count / row[i] for row in rounds) for i in (0, 1))
        ratio = statistics.median(row[1] / row[0] for row in rounds)
        print(f"  {what:14} ours {mine:8.1f} tokens/s, llama.cpp {peer:8.1f}: {ratio:.2f}x")
    step = statistics.median(ours.seconds(ids[:DEFAULT_IN], DEFAULT_OUT)[1] for _ in range(asked.rounds))
    held = sum(weight.nbytes for weight in ours.model.parameters())
    reached = held / step / calibrate().read_bandwidth
    print(f"  a decode step reads {held / 1e6:.0f} MB of weights: {100 * reached:.0f}% of the read bandwidth")


if __name__ == "__main__":
    main()
