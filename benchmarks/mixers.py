"""Mixers compared with transformers' classes: same weights, one run, alternating, medians of ratios.

Six layers of attention, Mamba-2, gated delta nets, and a hybrid (every third layer attention), all of the same number
of parameters, in float32 at batch 1. For each context a prefill, then decode steps after it: those of recurrent mixers
take as long after 32,768 tokens as after 512. Run it on an otherwise idle machine: `python benchmarks/mixers.py`.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, Mamba2Config, PreTrainedConfig, Qwen3_5TextConfig

from asbuilt import cost
from asbuilt.checkpoint.load import load
from asbuilt.errors import InputError
from asbuilt.families import read_config
from asbuilt.nn.build import interleave
from asbuilt.nn.cache import Cache
from asbuilt.nn.model import Model

CONTEXTS, STEPS, LAYERS, WIDTH = (512, 2048, 8192, 32768), 16, 6, 512
LINEAR, FULL = "linear_attention", "full_attention"
USUAL: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "tie_word_embeddings": True,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LONGEST = {"max_position_embeddings": 2 * CONTEXTS[-1]}
HEADS: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64} | LONGEST
NETS: dict[str, Any] = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
MAMBA: dict[str, Any] = {"state_size": 128, "num_heads": 16, "head_dim": 64, "expand": 2, "n_groups": 1}


def attention(d_ff: int) -> PreTrainedConfig:
    return LlamaConfig(**USUAL, **HEADS, intermediate_size=d_ff)


def delta_net(d_ff: int, kinds: tuple[str, ...] = (LINEAR,) * LAYERS) -> PreTrainedConfig:
    return Qwen3_5TextConfig(**USUAL, **HEADS, **NETS, intermediate_size=d_ff, layer_types=list(kinds))


def hybrid(d_ff: int) -> PreTrainedConfig:
    return delta_net(d_ff, (LINEAR, LINEAR, FULL) * (LAYERS // 3))


def mamba2(d_ff: int) -> PreTrainedConfig:
    return Mamba2Config(**USUAL, **MAMBA)


MODELS: dict[str, Callable[[int], PreTrainedConfig]] = {
    "attention": attention,
    "mamba-2": mamba2,
    "gated delta net": delta_net,
    "hybrid": hybrid,
}


def parameters(config: PreTrainedConfig) -> int:
    return cost.total_parameters(read_config(config.to_dict() | {"architectures": None}, "config").spec)


def of_size(make: Callable[[int], PreTrainedConfig], wanted: int) -> PreTrainedConfig:
    """Returns the config whose feed-forward makes it as large as wanted: parameters grow linearly with its width."""
    few, many = parameters(make(64)), parameters(make(128))
    return make(round(64 + 64 * (wanted - few) / (many - few))) if many > few else make(64)


class Ours:
    def __init__(self, folder: Path) -> None:
        self.model: Model = load(folder, dtype=torch.float32)
        interleave(self.model)  # as `generate` does: layers in native calls, where there are any

    def prefill(self, ids_1T: torch.Tensor) -> Callable[[], object]:
        """Computes the prompt, and returns what computes one more token."""
        cache = Cache(self.model.spec, batch=1, capacity=ids_1T.shape[1] + STEPS + 1, dtype=torch.float32)
        self.model(ids_1T, cache=cache, last=True)
        return lambda: self.model(ids_1T[:, :1], cache=cache, last=True)


class Theirs:
    def __init__(self, folder: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def prefill(self, ids_1T: torch.Tensor) -> Callable[[], object]:
        """Computes the prompt, and returns what computes one more token."""
        out = self.model(ids_1T, **self.beside(0, ids_1T.shape[1]), use_cache=True, logits_to_keep=1)
        key = next(name for name in ("cache", "past_key_values", "cache_params") if out.get(name) is not None)
        beside = self.beside(ids_1T.shape[1], 1)
        return lambda: self.model(ids_1T[:, :1], **{key: out[key]}, **beside, use_cache=True)

    def beside(self, past: int, new: int) -> dict[str, Any]:
        """Returns positions and masks for a model of delta nets alone: its cache cannot tell how long the text is."""
        config = self.model.config
        if not isinstance(config, Qwen3_5TextConfig) or set(config.layer_types or ()) != {LINEAR}:
            return {}
        positions = torch.arange(past, past + new)[None]
        return {"position_ids": positions, "attention_mask": {LINEAR: None, FULL: None}}


def timed(side: Ours | Theirs, ids_1T: torch.Tensor) -> tuple[float, float]:
    """Returns tokens per second of the prefill, and of the steps after it."""
    with torch.inference_mode():
        start = time.perf_counter()
        step = side.prefill(ids_1T)
        middle = time.perf_counter()
        for _ in range(STEPS):
            step()
        end = time.perf_counter()
    return ids_1T.shape[1] / (middle - start), STEPS / (end - middle)


def compare(name: str, sides: list[Ours | Theirs], context: int, rounds: int) -> None:
    """Prints medians of both sides at one context, and of the ratios of each round."""
    ids = torch.randint(1024, (1, context), generator=torch.Generator().manual_seed(0))
    for side in sides:
        timed(side, ids[:, :64])  # not counted
    measured = [[timed(side, ids) for side in sides] for _ in range(rounds)]
    for i, what in enumerate(("prefill", "decode")):
        ours, theirs = (statistics.median(row[side][i] for row in measured) for side in (0, 1))
        ratio = statistics.median(row[0][i] / row[1][i] for row in measured)
        print(f"  {name:16} {context:6} {what:8} {ours:10.1f} tokens/s, transformers {theirs:10.1f}: {ratio:.2f}x")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    arguments.add_argument("--mixers", nargs="+", choices=MODELS, default=[*MODELS])
    asked = arguments.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("asbuilt").setLevel(logging.ERROR)
    wanted = parameters(delta_net(1024))
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}, float32")
    for name in asked.mixers:
        try:
            config = of_size(MODELS[name], wanted)
        except InputError as refused:
            print(f"  {name}: {refused}")
            continue
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as folder:
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            sides: list[Ours | Theirs] = [Ours(Path(folder)), Theirs(Path(folder))]
        print(f"  {name}: {parameters(config) / 1e6:.1f}M parameters")
        for context in asked.contexts:
            compare(name, sides, context, asked.rounds)


if __name__ == "__main__":
    main()
