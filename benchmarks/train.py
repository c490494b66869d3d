"""Training speed beside transformers' GPT-2 and Llama (eager, or both compiled), and a plain PyTorch GPT, in one run.

    python benchmarks/train.py [--width 256] [--layers 4] [--context 128] [--batch 4] [--vocab 4096] [--compile]

With one thread the processor's time is counted, so that other processes disturb little; with more, the clock's. Both
take turns, round by round, and each round gives a ratio; the median of those is printed, with the rate of products
against that of a large matrix product in the same rounds. Beside transformers the
weights are the same, and the losses of the first step must agree.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from asbuilt import build, cost, decoder, save
from asbuilt.families import gpt2
from asbuilt.nn.model import Model
from asbuilt.spec import Model as Spec
from asbuilt.spec import Pass
from asbuilt.train.batch import Batch
from asbuilt.train.compiled import compile_blocks
from asbuilt.train.optimizer import optimizers
from asbuilt.train.precision import narrow_products
from asbuilt.train.settings import Optimizer
from asbuilt.train.step import train_step

GIVEN = Optimizer(lr=1e-3, weight_decay=0.0)


def specs(o: argparse.Namespace) -> dict[str, Spec]:
    sizes: dict[str, Any] = {
        "d_model": o.width,
        "n_layers": o.layers,
        "n_heads": o.width // 64,
        "n_vocab": o.vocab,
        "max_positions": o.context,
    }
    return {"gpt2": gpt2.build(**sizes), "llama": decoder(**sizes)}


def ours(
    model: Model, batch: Batch, *, compiled: bool = False, autocast: torch.dtype | None = None
) -> Callable[[], float]:
    made = optimizers(model, GIVEN)
    if compiled:
        compile_blocks(model)
    return lambda: train_step(model, [batch], made, clip=1.0, autocast=autocast).loss


def theirs(model: Any, batch: Batch, autocast: torch.dtype | None = None) -> Callable[[], float]:  # noqa: ANN401
    """A step as a plain loop over the library's class has it."""
    made = torch.optim.AdamW(model.parameters(), lr=GIVEN.lr, betas=GIVEN.betas, weight_decay=0.0, fused=True)

    def step() -> float:
        made.zero_grad(set_to_none=True)
        with nullcontext() if autocast is None else torch.autocast("cpu", autocast):
            logits = model(batch.ids, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        made.step()
        return float(loss.detach())

    return step


class PlainBlock(torch.nn.Module):
    """A GPT-2 block as one writes it in plain PyTorch, with fused attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.n_heads = width // 64
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.o = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns (B, T, M)."""
        q, k, v = (
            one.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for one in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norms[1](x)), approximate="tanh"))


class PlainGPT(torch.nn.Module):
    """A GPT-2 in plain PyTorch, its head tied."""

    def __init__(self, o: argparse.Namespace) -> None:
        super().__init__()
        self.tokens, self.places = (torch.nn.Embedding(rows, o.width) for rows in (o.vocab, o.context))
        self.blocks = torch.nn.ModuleList(PlainBlock(o.width) for _ in range(o.layers))
        self.norm = torch.nn.LayerNorm(o.width)
        for one in (self.tokens, self.places):
            torch.nn.init.normal_(one.weight, std=0.02)

    def forward(self, ids: torch.Tensor, use_cache: bool = False) -> SimpleNamespace:
        """Returns the logits, as transformers does."""
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for one in self.blocks:
            x = one(x)
        return SimpleNamespace(logits=torch.nn.functional.linear(self.norm(x), self.tokens.weight))


def pair(
    family: str, spec: Spec, batch: Batch, *, compiled: bool, autocast: torch.dtype | None = None
) -> tuple[Callable[[], float], Callable[[], float]]:
    """The step of our model, and that of transformers' with the same weights."""
    from transformers import AutoModelForCausalLM

    model = build(spec, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        save(model, Path(folder) / "model", family=family)
        other = AutoModelForCausalLM.from_pretrained(Path(folder) / "model", attn_implementation="eager").train()
    for one in other.modules():
        if isinstance(one, torch.nn.Dropout):
            one.p = 0.0
    other = torch.compile(other) if compiled else other
    return ours(model, batch, compiled=compiled, autocast=autocast), theirs(other, batch, autocast)


def seconds(step: Callable[[], float], steps: int) -> float:
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    begun = clock()
    for _ in range(steps):
        step()
    return (clock() - begun) / steps


def product_rate() -> float:
    """FLOP/s of a large float32 product."""
    a, b = torch.randn(768, 768), torch.randn(768, 768)
    return 2 * 768**3 / seconds(lambda: float((a @ b)[0, 0]), 10)


def measured(
    family: str, spec: Spec, o: argparse.Namespace, *, plain: bool = False, compiled: bool = False, narrow: bool = False
) -> str:
    ids = torch.randint(spec.n_vocab, (o.batch, o.context + 1), generator=torch.Generator().manual_seed(0))
    batch = Batch(ids=ids[:, :-1], targets=ids[:, 1:])
    autocast = torch.bfloat16 if narrow else None
    if plain:
        mine, other = ours(build(spec, seed=0), batch, autocast=autocast), theirs(PlainGPT(o), batch, autocast)
    else:
        mine, other = pair(family, spec, batch, compiled=compiled, autocast=autocast)
    first = mine(), other()
    assert plain or abs(first[0] - first[1]) < (1e-2 if narrow else 1e-4), first
    ratios, rates, shares = [], [], []
    flops = cost.flops(spec, Pass(tokens=o.context, batch=o.batch, width=4)).training
    for _ in range(o.rounds):
        one, two, rate = seconds(mine, o.steps), seconds(other, o.steps), product_rate()
        ratios.append(two / one)
        rates.append((batch.ids.numel() / one, batch.ids.numel() / two))
        shares.append(flops / one / rate)
    ours_rate, their_rate = (statistics.median(column) for column in zip(*rates, strict=True))
    beside = ("plain PyTorch" if plain else "transformers") + ", both compiled" * compiled + ", both in bf16" * narrow
    return (
        f"| {family}, beside {beside} | {ours_rate:,.0f} | {their_rate:,.0f} "
        f"| {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) "
        f"| {statistics.median(shares):.0%} |"
    )


def main() -> None:
    """Prints the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("width", 256),
        ("layers", 4),
        ("context", 128),
        ("batch", 4),
        ("steps", 5),
        ("rounds", 5),
        ("vocab", 4096),
        ("threads", 1),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--compile", action="store_true", help="both compiled too, which takes minutes")
    o = parser.parse_args()
    torch.set_num_threads(o.threads)
    print("| model | asbuilt, tokens/s | the other, tokens/s | ratio, median (range) | of the product rate |")
    print("|---|--:|--:|--:|--:|")
    bf16 = narrow_products(torch.device("cpu"))
    for family, spec in specs(o).items():
        print(measured(family, spec, o), flush=True)
        if bf16:
            print(measured(family, spec, o, narrow=True), flush=True)
        if o.compile:
            print(measured(family, spec, o, compiled=True), flush=True)
    print(measured("gpt2", specs(o)["gpt2"], o, plain=True), flush=True)
    if bf16:
        print(measured("gpt2", specs(o)["gpt2"], o, plain=True, narrow=True), flush=True)


if __name__ == "__main__":
    main()
