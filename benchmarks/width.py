"""Whether the best learning rate of a small width is that of a larger one: with muP and without, swept over seeds.

    python benchmarks/width.py TEXT [--widths 64 256] [--seeds 3] [--steps 50]

Two layers on the characters of a text. The last loss, averaged over the last fifth of the steps and over the seeds, of
each learning rate. At the first width muP changes nothing, so it is run once.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from asbuilt import build, decoder
from asbuilt.nn.build import initialise
from asbuilt.train.batch import Batch
from asbuilt.train.optimizer import optimizers
from asbuilt.train.settings import Optimizer
from asbuilt.train.step import train_step
from asbuilt.train.width import scales

RATES = [2.0**-power for power in range(10, 3, -1)]


def loss(ids: torch.Tensor, width: int, base: int, lr: float, seed: int, o: argparse.Namespace) -> float:
    """The mean loss of the last fifth of a run, with a linear warmup and no decay."""
    n_vocab = int(ids.max()) + 1
    model = build(decoder(d_model=width, n_layers=2, n_heads=width // 32, n_vocab=n_vocab, tied=False), seed=None)
    initialise(model, seed, o.std, {path: one.std for path, one in scales(model.spec, base).items()})
    made = optimizers(model, Optimizer(lr=lr, weight_decay=0.0), base)
    drawn, losses = torch.Generator().manual_seed(seed), []
    for step in range(o.steps):
        starts = torch.randint(len(ids) - o.context - 1, (o.batch, 1), generator=drawn)
        rows = ids[starts + torch.arange(o.context + 1)]
        batch = Batch(ids=rows[:, :-1], targets=rows[:, 1:])
        losses.append(train_step(model, [batch], made, factor=min(1.0, (step + 1) / 5), clip=1.0).loss)
    last = losses[-max(1, o.steps // 5) :]
    return sum(last) / len(last)


def main() -> None:
    """Prints the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--widths", type=int, nargs=2, default=(64, 256))
    parser.add_argument("--std", type=float, default=0.05)
    for name, default in (("seeds", 3), ("steps", 50), ("context", 32), ("batch", 8), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    o = parser.parse_args()
    torch.set_num_threads(o.threads)
    text = o.text.read_text(encoding="utf-8")
    order = {c: i for i, c in enumerate(sorted(set(text)))}
    ids = torch.tensor([order[c] for c in text])
    small, large = o.widths
    print("| width | " + " | ".join(f"{rate:.4g}" for rate in RATES) + " | best |")
    print("|---|" + "--:|" * (len(RATES) + 1))
    for told, width, base in ((f"{small}", small, 0), (f"{large}, muP", large, small), (f"{large}", large, 0)):
        found = []
        for rate in RATES:
            runs = [loss(ids, width, base, rate, seed, o) for seed in range(1, o.seeds + 1)]
            found.append(sum(runs) / len(runs))
        best = RATES[found.index(min(found))]
        print(f"| {told} | " + " | ".join(f"{one:.3f}" for one in found) + f" | {best:.4g} |", flush=True)


if __name__ == "__main__":
    main()
