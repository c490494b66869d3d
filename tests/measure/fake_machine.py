"""A machine on which every library call takes a known time, so that what is measured on it can be worked out by hand.

Nothing is timed: the clock stands still but for what each call adds to it. Of work on single numbers a call takes a
start and its bytes over a rate; of products the FLOPs over a rate, or the bytes of the matrix where one row is
multiplied; every module entered takes a fixed time more. The first call of a name and dtype takes ten times as long.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from asbuilt.kernels import rows
from asbuilt.measure import micro, timing

READ_RATE = 1e9  # bytes/s of a matrix times one row, and of a cache's attention
PRODUCT_RATE = 5e9  # FLOP/s
ATTENTION_RATE = 2e9  # FLOP/s
NUMBERS_START, NUMBERS_RATE, VIEW = 20e-6, 40e9, 1e-6
MODULE = 50e-6
COLD = 10  # times as long, the first time
SLOW = {torch.float32: 1.0, torch.bfloat16: 0.5}  # bfloat16 products take half as long as their bytes and FLOPs say


class FakeMachine(TorchDispatchMode):
    """Runs every call as it is, and adds what it takes here to `now`."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.speed, self.seen = 0.0, 1.0, set[object]()
        self.counted: list[tuple[str, float]] = []

    def clock(self) -> float:
        """Returns the time here."""
        return self.now

    def add(self, name: str, key: object, seconds: float) -> None:
        """Lets the time of a call pass."""
        cold = 1 if (name, key) in self.seen else COLD
        self.seen.add((name, key))
        self.now += cold * seconds / self.speed
        self.counted.append((name, seconds))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Takes a call apart until it is one of the library's own, and runs it."""
        with self:
            made = func.decompose(*args, **(kwargs or {}))
        if made is not NotImplemented:
            return made
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        tensors = [x for x in _flat(args) if isinstance(x, Tensor)]
        results = [x for x in _flat([out]) if isinstance(x, Tensor)]
        key = tensors[0].dtype if tensors else None
        self.add(name, key, _seconds(func, name, tensors, results))
        return out


class FakeAttention(TorchFunctionMode):
    """Fused attention as one call, whatever kernels the library has for it."""

    def __init__(self, machine: FakeMachine) -> None:
        super().__init__()
        self.machine = machine

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Returns zeros in the shape of attention's result, and passes everything else on."""
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        q, k, v = args[:3]
        if q.shape[-2] <= 16 and not (kwargs or {}).get("is_causal"):
            seconds = (k.nbytes + v.nbytes) / READ_RATE
        else:
            seconds = 4 * q.numel() * k.shape[-2] / ATTENTION_RATE
        self.machine.add("attention", q.dtype, seconds)
        before = self.machine.now, len(self.machine.counted)
        out = torch.zeros_like(q)
        self.machine.now = before[0]
        del self.machine.counted[before[1] :]
        return out


def _seconds(func: Any, name: str, tensors: list[Tensor], results: list[Tensor]) -> float:  # noqa: ANN401
    if name in ("mm", "addmm", "bmm", "baddbmm"):
        a, b = tensors[-2:]
        flops = 2 * a.numel() * b.shape[-1]
        product = b.nbytes / READ_RATE if a.shape[-2] == 1 else flops / PRODUCT_RATE
        bias = 0.0 if name in ("mm", "bmm") else NUMBERS_START + 2 * results[0].nbytes / NUMBERS_RATE
        return SLOW[a.dtype] * product + bias
    if any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns):
        return VIEW
    if name in ("embedding", "index", "index_select"):
        return NUMBERS_START + 2 * sum(x.nbytes for x in results) / NUMBERS_RATE
    return NUMBERS_START + sum(x.nbytes for x in (*tensors, *results)) / NUMBERS_RATE


def _flat(values: Any) -> list[Any]:  # noqa: ANN401
    return [y for x in values for y in (_flat(x) if isinstance(x, list | tuple) else [x])]


@contextmanager
def fake_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMachine]:
    """Times everything within by the fake machine, calibrates with small grids, and multiplies by the usual call."""
    machine = FakeMachine()
    monkeypatch.setattr(timing, "clock", machine.clock)
    monkeypatch.setattr(rows, "pieces_are_faster", lambda threads: False)
    monkeypatch.setattr(rows, "own_kernel_is_faster", lambda dtype, threads: False)
    grids = {
        "VECTOR": ((128, 512), (128, 512)),
        "MATRIX": ((16, 64), (128, 512), (128, 512)),
        "ATTENTION": ((1, 4), (20, 64), (8, 32)),
        "ATTENTION_READ": ((1, 4), (16, 64), (8, 32)),
    }
    for name, grid in grids.items():
        monkeypatch.setattr(micro, name, grid)
    monkeypatch.setattr(micro, "GRIDS", {name.lower(): grid for name, grid in grids.items()})
    monkeypatch.setattr(micro, "MEMORY", 2**22)
    monkeypatch.setattr(micro, "NUMBERS", (768, 2**16))
    stack = micro.stack
    monkeypatch.setattr(micro, "stack", lambda layers=2, width=128: stack(layers, width))
    monkeypatch.setattr(micro, "STACKS", ((2, 128), (2, 256), (3, 384)))
    monkeypatch.setattr(micro, "STACK_STEPS", 6)
    monkeypatch.setattr(timing.Others, "share", lambda self: 0.0)  # the real machine may be busy
    for name in ("DECODE_ROUNDS", "PREFILL_ROUNDS", "SMALL_ROUNDS"):
        monkeypatch.setattr(micro, name, 1)
    hook = register_module_forward_pre_hook(lambda *_: machine.add("module", None, MODULE))
    try:
        with machine, FakeAttention(machine):
            yield machine
    finally:
        hook.remove()
