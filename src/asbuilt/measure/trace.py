"""The calls that one forward pass makes, found by running the built model on the meta device: no data, no arithmetic.

From them and a calibration comes the predicted time. The trace is as true of a part added tomorrow as of today's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from asbuilt.generate.cache import Cache
from asbuilt.measure.calibrate import Calibration, Rates
from asbuilt.measure.run import source_of
from asbuilt.nn import build
from asbuilt.spec.model import Model

Work = Literal["view", "vector", "matrix", "attention", "attention_read", "arithmetic", "transcendental"]
PRODUCTS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default")
TRANSCENDENTAL = ("silu", "gelu", "tanh", "exp", "softmax", "sigmoid", "sin", "cos")
# Rows up to which a product is bound by reading its matrix; beyond, by the matrix rate.
FEW_ROWS = 4


@dataclass(frozen=True)
class Call:
    """One library call: its kind, and its bytes (views: none; products with many rows and attention: FLOPs)."""

    name: str
    work: Work
    amount: float


class Recorder(TorchDispatchMode):
    """Keeps every call below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Runs the call and writes it down."""
        out = func(*args, **(kwargs or {}))
        self.calls.append(_classify(func, args, out))
        return out


class WholeAttention(TorchFunctionMode):
    """Takes fused attention as one call, as it is on a device that has the kernel; the meta device would unroll it."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Writes attention down and returns an empty result of its shape; passes everything else on."""
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        q, k, v = args[:3]
        single = q.shape[-2] <= FEW_ROWS * 4 and not (kwargs or {}).get("is_causal")
        flops = 4 * q.numel() * k.shape[-2]
        call = (
            Call("attention", "attention_read", k.nbytes + v.nbytes)
            if single
            else Call("attention", "attention", flops)
        )
        self.recorder.calls.append(call)
        with _disable_current_modes():
            return torch.empty_like(q)


def _classify(func: Any, args: tuple[Any, ...], out: Any) -> Call:  # noqa: ANN401
    name = str(func)
    tensors = [x for x in _flat(args) if isinstance(x, Tensor)]
    results = [x for x in _flat([out]) if isinstance(x, Tensor)]
    if name in PRODUCTS:
        a, b = tensors[-2:]
        rows = a.shape[-2]
        if rows <= FEW_ROWS:
            return Call(name, "vector", b.nbytes)
        return Call(name, "matrix", 2 * a.numel() * b.shape[-1])
    if _is_view(func):
        return Call(name, "view", 0)
    if "embedding" in name or "index" in name:
        return Call(name, "arithmetic", 2 * sum(x.nbytes for x in results))
    nbytes = sum(x.nbytes for x in tensors) + sum(x.nbytes for x in results)
    slow = any(word in name for word in TRANSCENDENTAL)
    return Call(name, "transcendental" if slow else "arithmetic", nbytes)


def _is_view(func: Any) -> bool:  # noqa: ANN401
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _flat(values: Any) -> list[Any]:  # noqa: ANN401
    return [y for x in values for y in (_flat(x) if isinstance(x, list | tuple) else [x])]


@dataclass(frozen=True)
class Trace:
    """The calls of one forward pass, and how many modules were entered."""

    calls: tuple[Call, ...]
    modules: int

    def seconds(self, machine: Calibration, dtype: str) -> float:
        """Returns the predicted time: each call by its line, and what entering a module costs."""
        rates = machine.rates[dtype]
        return self.modules * machine.module_seconds + sum(
            _cost(call, rates, machine.view_seconds) for call in self.calls
        )


def _cost(call: Call, rates: Rates, view: float) -> float:
    return view if call.work == "view" else getattr(rates, call.work).seconds(call.amount)


def trace(spec: Model, *, tokens: int, past: int, batch: int = 1, dtype: torch.dtype) -> Trace:
    """Returns the trace of `tokens` new tokens after `past` cached ones, logits for the last, as generation runs it."""
    model = build(spec, dtype=dtype, device="meta")
    cache = Cache(spec, batch=batch, capacity=past + tokens, dtype=dtype, device="meta")
    cache.lengths = (past,) * batch
    recorder, modules = Recorder(), _ModuleCount(model)
    ids = torch.zeros(batch, tokens, dtype=torch.long, device="meta")
    source = source_of(model, ids) if past == 0 else {}
    cache.source_tokens = past + tokens
    with torch.no_grad(), recorder, WholeAttention(recorder):  # inference mode would hide what a call consists of
        model(ids, **source, cache=cache, last=True)[:, -1].argmax(-1)
    return Trace(tuple(recorder.calls), modules.count)


class _ModuleCount:
    def __init__(self, model: torch.nn.Module) -> None:
        self.count = 0
        hook: Callable[..., None] = self._enter
        for module in model.modules():
            module.register_forward_pre_hook(hook)

    def _enter(self, *args: object) -> None:
        self.count += 1
