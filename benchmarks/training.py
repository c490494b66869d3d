"""Memory of a training step, predicted by `asbuilt plan train` and measured by PyTorch's allocator, in one table.

Models of five families at their published widths and vocabularies, with the first blocks only and random weights:
AdamW's state (exact by construction, but measured), and the peak bytes beyond it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from asbuilt.catalog import find
from asbuilt.catalog.machine import Machine
from asbuilt.measure.run import peak_bytes
from asbuilt.nn import build
from asbuilt.nn.model import Model
from asbuilt.plan import train
from asbuilt.plan.render import Table, markdown

NAMES = ("smollm2-135m", "gpt2", "pythia-70m", "qwen3-0.6b", "bloom-560m")
BLOCKS, SEQ, BATCH = 2, 128, 1
HERE = Machine(name="here", memory_gb=64, bandwidth=1e10, rates={"fp32": 1e11})


def forward(model: Model, tokens: Tensor, *, again: bool) -> Tensor:
    """Returns logits; with `again`, each block's activations are recomputed in the backward pass."""
    if not again:
        return model(tokens)
    begun = model.begin((len(tokens), tokens.shape[1]), tokens.device, None, None, "fused")
    x = model.embedding(tokens, begun)
    if model.positions is not None:
        x = x + model.positions(begun)
    for block in model.blocks:
        x = checkpoint(block, x, begun, use_reentrant=False)
    x = x if model.norm is None else model.norm(x)
    assert model.head is not None
    return model.head(x, model.embedding.weight)


def step_of(model: Model, tokens: Tensor, *, again: bool) -> Callable[[], None]:
    """Runs one forward and backward pass; only tensors that autograd needs are kept."""

    def step() -> None:
        loss = F.cross_entropy(forward(model, tokens, again=again).float().flatten(0, 1), tokens.flatten())
        loss.backward()

    return step


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of all tensors, without an optimizer's step counts."""
    return sum(t.numel() * t.element_size() for t in tensors if t.dim())


def row(name: str, checkpointing: str) -> tuple[str | float, ...]:
    """Returns the predicted and measured bytes of one model, and their difference."""
    whole = find(name).spec()
    spec = replace(whole, blocks=whole.blocks[:BLOCKS])
    plan = train(spec, HERE, seq=SEQ, batch=BATCH, dtype="fp32", checkpointing=checkpointing)
    model = build(spec, dtype=torch.float32, seed=0)
    tokens = torch.randint(spec.n_vocab, (BATCH, SEQ), generator=torch.Generator().manual_seed(0))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    step = step_of(model, tokens, again=checkpointing == "full")
    step()
    peak = peak_bytes(step)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    moments = [t for state in optimizer.state.values() for t in state.values()]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    state = nbytes(model.parameters()) + nbytes(gradients) + nbytes(moments)
    said = plan.per_device_bytes - plan.state.total
    assert state == plan.state.total, (name, state, plan.state.total)
    return name, checkpointing, state / 1e6, said / 1e6, peak / 1e6, f"{said / peak - 1:+.2%}"


def main() -> None:
    """Prints the table as Markdown."""
    torch.set_num_threads(2)
    rows = []
    for which in product(NAMES, ("none", "full")):
        print(*which, file=sys.stderr)
        rows.append(row(*which))
    columns = ("model", "checkpointing", "AdamW state, MB (exact)", "predicted, MB", "measured, MB", "error")
    title = f"One step of {BATCH} x {SEQ} tokens in float32, {BLOCKS} blocks, beyond the state"
    print(markdown([Table(title, columns, rows)]))


if __name__ == "__main__":
    main()
