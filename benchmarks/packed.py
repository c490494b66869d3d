"""GGUF files beside llama.cpp (the wheel xllamacpp), in turn, in one run: decode, batches, prefill, texts, perplexity.
Speeds of one text are beside openvino-genai's too, if it is installed and reads the file; what it refuses is printed.

Ours keeps the file's blocks and multiplies them with the native kernels (`asbuilt[native]`); both use the same threads,
tokens and file, with a cache in float32 (ours) and float16 (llama.cpp's usual). Medians of rounds, and of their ratios.
Run it on an otherwise idle machine:

    python benchmarks/packed.py [FILE.gguf ...]         by default SmolLM2 as it comes
    python benchmarks/packed.py --formats q8_0,q4_0     SmolLM2, written in these formats first
    python benchmarks/packed.py --billion q4_1          a random Llama of 16 layers, width 2048, written first
    python benchmarks/packed.py --load                  a busy process on each core meanwhile
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import asbuilt
from asbuilt.checkpoint.load import load
from asbuilt.checkpoint.source import open_model as as_source
from asbuilt.generate.decode import generate
from asbuilt.kernels import native
from asbuilt.measure.calibrate import calibrate
from asbuilt.nn import build
from asbuilt.nn.build import interleave
from asbuilt.nn.model import Model
from asbuilt.text.tokenizer import Tokenizer

IN, OUT, PREFILLS, BATCHES, GREEDY = 64, 64, (512, 2048), (8, 32), 64
TEXT = Path(__file__).parents[1] / ".." / "shared" / "data" / "tinyshakespeare.txt"
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Water boils at",
    "Once upon a time there was a fox who",
    "The three most important things about a bridge are",
)


def locate() -> Path:
    """Returns the path of SmolLM2's GGUF file, without importing the package that contains it."""
    script = Path(__file__).parent.parent / "demo" / "find_smollm2.py"
    return Path(subprocess.run([sys.executable, script], check=True, capture_output=True, text=True).stdout.strip())


def timed_steps(model: Model, prompts: list[list[int]], new: int) -> tuple[float, float]:
    """Returns the seconds of the prefill with its tokens, and of each further step."""
    start = time.perf_counter()
    steps = generate(model, prompts, max_new_tokens=new, eos_ids=())
    next(steps)
    middle = time.perf_counter()
    count = sum(1 for _ in steps)
    return middle - start, (time.perf_counter() - middle) / max(1, count)


class Ours:
    """The file as it is held: blocks, computed with in `dtype` or float32, or plain weights in their own dtype."""

    def __init__(self, path: Path, dtype: torch.dtype | None = None) -> None:
        packed = holds_blocks(path)
        self.model = load(path, dtype or (torch.float32 if packed else plain_dtype(path)), packed=packed)
        self.interleaved = interleave(self.model)

    def seconds(self, prompts: list[list[int]], new: int) -> tuple[float, float]:
        return timed_steps(self.model, prompts, new)

    def text(self, ids: list[int], new: int) -> list[int | None]:
        return [step[0] for step in generate(self.model, [ids], max_new_tokens=new, eos_ids=())]


class Theirs:
    def __init__(self, path: Path, threads: int, slots: int = 1) -> None:
        x: Any = import_module("xllamacpp")
        params = x.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel, params.n_gpu_layers = max(4096, 256 * slots), slots, 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        self.server = x.Server(params)

    def _asked(self, ids: list[int], new: int) -> dict[str, Any]:
        ask = {"prompt": ids, "n_predict": new, "temperature": 0.0, "cache_prompt": False, "ignore_eos": True}
        answer = self.server.handle_completions(ask | {"return_tokens": True})
        return json.loads(answer) if isinstance(answer, str) else answer

    def seconds(self, prompts: list[list[int]], new: int) -> tuple[float, float]:
        """Returns the same, as llama.cpp states them; of a batch, whose texts run at once, the slowest."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            found = [answer["timings"] for answer in pool.map(lambda ids: self._asked(ids, new), prompts)]
        return max(t["prompt_ms"] for t in found) / 1e3, max(t["predicted_per_token_ms"] for t in found) / 1e3

    def text(self, ids: list[int], new: int) -> list[int]:
        return self._asked(ids, new)["tokens"]


class OpenVino:
    def __init__(self, path: Path, threads: int) -> None:
        self.genai, self.tensor = import_module("openvino_genai"), import_module("openvino").Tensor
        how = self.genai.SchedulerConfig()
        how.enable_prefix_caching = False  # each round has the same prompts
        self.pipe = self.genai.LLMPipeline(str(path), "CPU", scheduler_config=how, INFERENCE_NUM_THREADS=threads)

    def seconds(self, prompts: list[list[int]], new: int) -> tuple[float, float]:
        """Returns the same, as its metrics state them."""
        how = self.genai.GenerationConfig()
        how.max_new_tokens, how.ignore_eos, how.do_sample = new, True, False
        ids = torch.tensor(prompts)
        read = self.genai.TokenizedInputs(self.tensor(ids.numpy()), self.tensor(torch.ones_like(ids).numpy()))
        found = self.pipe.generate(read, how).perf_metrics
        return found.get_ttft().mean / 1e3, found.get_tpot().mean / 1e3


def openvino(path: Path, threads: int) -> OpenVino | None:
    """Returns the peer, None where it is absent or refuses the file, which is printed."""
    if find_spec("openvino_genai") is None:
        print("  openvino-genai is not installed: not compared with it (pip install openvino-genai)")
        return None
    try:
        return OpenVino(path, threads)
    except RuntimeError as error:
        print(f"  openvino-genai refuses {path.name}: {str(error).strip().splitlines()[-1]}")
        return None


def tokenizer_of(path: Path) -> Tokenizer:
    found = as_source(path).tokenizer()
    assert found is not None
    return found


def holds_blocks(path: Path) -> bool:
    tensors = as_source(path).gguf.tensors.values()  # type: ignore[union-attr]
    return any(
        native.number(tensor.type.lower()) >= 0 for tensor in tensors if tensor.type not in ("F32", "F16", "BF16")
    )


def plain_dtype(path: Path) -> torch.dtype:
    types = {tensor.type for tensor in as_source(path).gguf.tensors.values()}  # type: ignore[union-attr]
    return torch.float16 if "F16" in types else torch.bfloat16 if "BF16" in types else torch.float32


def drawn(count: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1000, 2000, (count, length), generator=generator).tolist()


def compared(sides: list[Any], prompts: list[list[int]], new: int, which: int, rounds: int) -> tuple[float, ...]:
    """Returns the sides' tokens per second and the ratios of the first to each other, all medians."""
    found = [[side.seconds(prompts, new)[which] for side in sides] for _ in range(rounds + 1)][1:]
    count = len(prompts) * (1 if which else len(prompts[0]))
    speeds = [statistics.median(count / row[i] for row in found) for i in range(len(sides))]
    return (*speeds, *(statistics.median(row[i] / row[0] for row in found) for i in range(1, len(sides))))


def speeds(path: Path, rounds: int, threads: int, only: str = "") -> None:
    ours, one = Ours(path), Theirs(path, threads)
    print(f"{path.name}: {ours.interleaved} matrices interleaved, {native.instructions()}, {threads} threads")
    third = openvino(path, threads)
    cases = [("decode", drawn(1, IN), OUT, 1), *((f"decode of {n}", drawn(n, 32), 32, 1) for n in BATCHES)]
    cases += [(f"prefill {n}", drawn(1, n), 2, 0) for n in PREFILLS]
    for what, prompts, new, which in cases:
        if not what.startswith(only):
            continue
        theirs = one if len(prompts) == 1 else Theirs(path, threads, len(prompts))
        # of a batch its metrics do not say whether they are of a step or of a token
        sides = [ours, theirs] if third is None or len(prompts) > 1 else [ours, theirs, third]
        mine, *others = compared(sides, prompts, new, which, rounds)
        peers = zip(("llama.cpp", "openvino"), others, others[len(sides) - 1 :], strict=False)
        told = ", ".join(f"{name} {speed:8.1f}: {ratio:.2f}x" for name, speed, ratio in peers)
        print(f"  {what:14} ours {mine:8.1f} tokens/s, {told}", flush=True)
    step = statistics.median(ours.seconds(drawn(1, IN), OUT)[1] for _ in range(rounds))
    held = sum(weight.nbytes for weight in ours.model.parameters())
    reached = held / step / calibrate().read_bandwidth
    print(f"  a decode step reads {held / 1e6:.0f} MB of weights: {100 * reached:.0f}% of the read bandwidth")


def prefill_beside_torch(path: Path, rounds: int) -> None:
    """Our prefill of the file beside torch's of the same weights expanded, both in float32 and both in bfloat16."""
    for dtype in (torch.float32, torch.bfloat16):
        ours, other = Ours(path, dtype), load(path, dtype)
        for length in PREFILLS:
            found = []
            for _ in range(rounds + 1):
                mine = ours.seconds(drawn(1, length), 1)[0]
                with native.switched_off():
                    found.append((mine, timed_steps(other, drawn(1, length), 1)[0]))
            mine, peer = (statistics.median(length / row[i] for row in found[1:]) for i in (0, 1))
            ratio = statistics.median(row[1] / row[0] for row in found[1:])
            what = f"prefill {length:6} in {str(dtype).removeprefix('torch.')}"
            print(f"  {what}: ours {mine:8.1f} tokens/s, torch {peer:8.1f}: {ratio:.2f}x", flush=True)


def texts(path: Path) -> None:
    """Greedy texts of the packed model beside the expanded one's: equal, or where they part, how near a tie it was."""
    ours, expanded, tokenizer = Ours(path), load(path, torch.float32), tokenizer_of(path)
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt)
        mine, theirs = ours.text(ids, GREEDY), [s[0] for s in generate(expanded, [ids], max_new_tokens=GREEDY)]
        same = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), GREEDY)
        told = "equal"
        if same < min(len(mine), len(theirs)):
            whole = torch.tensor([ids + [token or 0 for token in theirs[:same]]])
            logits = expanded(whole, last=True)[0, -1].log_softmax(-1)
            first, second = logits[theirs[same]], logits[mine[same]]  # type: ignore[index]
            told = f"part after {same}: log-probabilities {float(first):.4f} and {float(second):.4f}"
        print(f"  {GREEDY} tokens after {prompt!r}: {told}", flush=True)


def perplexity(path: Path, tokens: int = 4096, context: int = 512, theirs_of: int = 96) -> None:
    """Nats per token of windows of a text, packed and expanded; and of the first tokens of each, llama.cpp's too."""
    ids = tokenizer_of(path).encode(TEXT.read_text()[: 6 * tokens])[:tokens]
    windows = [ids[i : i + context] for i in range(0, len(ids) - context + 1, context)]
    ours, expanded, theirs = Ours(path).model, load(path, torch.float32), Theirs(path, torch.get_num_threads())
    found: dict[str, list[float]] = {name: [] for name in ("packed", "expanded", "packed, first", "llama.cpp, first")}
    for i, window in enumerate(windows):
        for name, model in (("packed", ours), ("expanded", expanded)):
            logits = model(torch.tensor([window]))[0, :-1].log_softmax(-1)
            nats = -logits.gather(1, torch.tensor(window[1:])[:, None])[:, 0]
            found[name].append(float(nats.mean()))
            if name == "packed" and i < 4:
                found["packed, first"].append(float(nats[: theirs_of - 1].mean()))
        if i < 4:
            found["llama.cpp, first"].append(theirs_nats(theirs, window[:theirs_of], ours.spec.n_vocab))
    for name, nats in found.items():
        mean = statistics.mean(nats)
        print(f"  {name:16} {mean:.5f} nats per token, perplexity {math.exp(mean):.3f}", flush=True)


def theirs_nats(theirs: Theirs, window: list[int], vocabulary: int) -> float:
    """llama.cpp's nats per token of a window, each place asked for on its own, with all probabilities."""
    total = 0.0
    for i in range(1, len(window)):
        ask = {"prompt": window[:i], "n_predict": 1, "temperature": 0.0, "cache_prompt": True, "n_probs": vocabulary}
        answer = theirs.server.handle_completions(ask)
        answer = json.loads(answer) if isinstance(answer, str) else answer
        known = {one["id"]: one["logprob"] for one in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]}
        total -= known[window[i]]
    return total / (len(window) - 1)


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Runs as many processes that never wait."""
    workers = [multiprocessing.Process(target=_spin, daemon=True) for _ in range(count)]
    for worker in workers:
        worker.start()
    try:
        yield
    finally:
        for worker in workers:
            worker.kill()


def _spin() -> None:
    while True:
        pass


def written(formats: list[str], folder: Path, billion: str | None) -> Iterator[Path]:
    """Writes the asked files and yields their paths."""
    source = locate()
    if billion:
        spec = asbuilt.decoder(d_model=2048, n_layers=16, n_heads=32, n_kv_heads=8, d_ff=8192, n_vocab=49152)
        asbuilt.save(build(spec, dtype=torch.bfloat16), folder / "billion")
        subprocess.run([sys.executable, "-m", "asbuilt", "convert", source, folder / "smol"], check=True)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / "billion" / name).write_bytes((folder / "smol" / name).read_bytes())
        source, formats = folder / "billion", [billion]
    for format in formats:
        path = folder / f"{source.stem}-{format}.gguf"
        run = [sys.executable, "-m", "asbuilt", "quantize", source, path, "--format", format]
        subprocess.run(run, check=True, stdout=subprocess.DEVNULL)
        yield path


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("files", nargs="*", type=Path)
    arguments.add_argument("--formats", default="")
    arguments.add_argument("--billion")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments.add_argument("--load", action="store_true")
    arguments.add_argument("--only", default="", help="cases whose name begins so: decode, prefill, 'decode of 8'")
    arguments.add_argument("--what", default="speeds,torch,texts,perplexity")
    asked = arguments.parse_args()
    torch.set_num_threads(asked.threads)
    torch.set_grad_enabled(False)
    works = {
        "speeds": lambda path: speeds(path, asked.rounds, asked.threads, asked.only),
        "torch": lambda path: prefill_beside_torch(path, asked.rounds),
        "texts": texts,
        "perplexity": perplexity,
    }
    with tempfile.TemporaryDirectory() as folder, busy(torch.get_num_threads() if asked.load else 0):
        made = written([f for f in asked.formats.split(",") if f], Path(folder), asked.billion)
        paths = [*asked.files, *made] if asked.files or asked.formats or asked.billion else [locate()]
        for path in paths:
            for name in asked.what.split(","):
                works[name](path)


if __name__ == "__main__":
    main()
