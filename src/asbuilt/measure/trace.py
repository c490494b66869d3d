"""The library calls of one forward pass, found by running the built model on the meta device: no data, no arithmetic.

They and a calibration give the predicted time. Nothing in the trace depends on which parts exist.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from asbuilt.measure.rates import Calibration, Rates, TimeGrid
from asbuilt.nn import build
from asbuilt.nn.cache import Cache
from asbuilt.nn.fixed_inputs import source_of
from asbuilt.spec.model import Model

Work = Literal["vector", "matrix", "attention", "attention_read", "numbers"]
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
BIASED = ("addmm", "baddbmm")
# Elementwise functions with a line of their own, and the name of that line.
LINES = {
    "silu": "silu",
    "gelu": "gelu",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
    "exp": "exp",
    "rsqrt": "exp",
    "_softmax": "softmax",
    "_log_softmax": "softmax",
    "sin": "sin",
    "cos": "sin",
    "softplus": "exp",
}
# Queries per head of the cache up to which attention is bound by reading the cache.
FEW_QUERIES = 16


@dataclass(frozen=True)
class Call:
    """One library call: its kind, its amount, and the sizes to look up in its table or the line of its function.

    The amount is in bytes (of the matrix for one row, of the cache for one token's attention), or in FLOPs for products
    of more rows and for attention; views have none. `matrix` is the bytes of a product's matrix.
    """

    name: str
    work: Work
    amount: float
    sizes: tuple[float, ...] = ()
    line: str = "arithmetic"
    matrix: float = 0


class Recorder(TorchDispatchMode):
    """Records every call below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Runs the call and records it."""
        out = func(*args, **(kwargs or {}))
        self.calls.append(_classify(func, args, kwargs or {}, out))
        if func.overloadpacket.__name__ in BIASED:  # the result is initialised with the bias of every row
            self.calls.append(Call("bias", "numbers", 2 * out.nbytes))
        return out


class WholeAttention(TorchFunctionMode):
    """Records fused attention as one call, as on a device that has the kernel; the meta device would decompose it."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Records attention and returns an empty result of its shape; passes everything else on."""
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        q, k, v = args[:3]
        heads, queries, keys, width = math.prod(k.shape[:-2]), q.shape[-2], k.shape[-2], k.shape[-1]
        if queries <= FEW_QUERIES and not (kwargs or {}).get("is_causal"):
            call = Call("attention", "attention_read", k.nbytes + v.nbytes, (heads, keys, width))
        else:
            heads, tokens = math.prod(q.shape[:-2]), math.sqrt(queries * keys)
            call = Call("attention", "attention", 4 * q.numel() * keys, (heads, tokens, width))
        self.recorder.calls.append(call)
        with _disable_current_modes():
            return torch.empty_like(q)


def _classify(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Call:  # noqa: ANN401
    name = func.overloadpacket.__name__
    tensors = [x for x in _flat(args) if isinstance(x, Tensor)]
    results = [x for x in _flat([out]) if isinstance(x, Tensor)]
    if name in PRODUCTS:
        a, b = tensors[-2:]
        inside, wide = b.shape[-2:]
        if a.shape[-2] == 1:  # a batched product reads a stack of matrices
            return Call(name, "vector", b.nbytes, (b.numel() // inside, inside), matrix=b.nbytes)
        return Call(name, "matrix", 2 * a.numel() * wide, (a.numel() // inside, inside, wide), matrix=b.nbytes)
    if _is_view(func):
        return Call(name, "numbers", 0, line="view")
    if "embedding" in name or "index" in name:
        return Call(name, "numbers", 2 * sum(x.nbytes for x in results))
    nbytes = sum(x.nbytes for x in tensors) + sum(x.nbytes for x in results)
    line = LINES.get(name.removesuffix("_") if not name.startswith("_") else name, "arithmetic")
    return Call(name, "numbers", nbytes, line="gelu tanh" if kwargs.get("approximate") == "tanh" else line)


def _is_view(func: Any) -> bool:  # noqa: ANN401
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _flat(values: Any) -> list[Any]:  # noqa: ANN401
    return [y for x in values for y in (_flat(x) if isinstance(x, list | tuple) else [x])]


@dataclass(frozen=True)
class Trace:
    """The calls of one forward pass."""

    calls: tuple[Call, ...]

    def seconds(self, machine: Calibration, dtype: str) -> float:
        """Returns the predicted time, `work + between(bytes of matrices) * starts`."""
        rates = machine.rates[dtype]
        return self.work(rates) + rates.slowed(self.matrices) * self.starts(rates)

    @property
    def matrices(self) -> float:
        """The bytes of the matrices that the products read."""
        return sum(call.matrix for call in self.calls)

    def work(self, rates: Rates) -> float:
        """Returns the seconds that depend on sizes: products and attention by their tables, the rest by bytes."""
        return sum(
            call.amount / rates.lines[call.line].rate if call.work == "numbers" else _table(call, rates)
            for call in self.calls
        )

    def starts(self, rates: Rates) -> float:
        """Returns the constant part of the seconds of small calls, as timed alone."""
        return sum(rates.lines[call.line].start for call in self.calls if call.work == "numbers")


def _table(call: Call, rates: Rates) -> float:
    table: TimeGrid = getattr(rates, call.work)
    return table.at(*call.sizes)


def trace(spec: Model, *, tokens: int, past: int, batch: int = 1, dtype: torch.dtype) -> Trace:
    """Returns the trace of `tokens` new tokens after `past` cached ones, with logits of the last, as in generation."""
    with torch.inference_mode(False), torch.no_grad():  # inference mode would hide the parts of a call
        return _trace(spec, tokens, past, batch, dtype)


def _trace(spec: Model, tokens: int, past: int, batch: int, dtype: torch.dtype) -> Trace:
    model = build(spec, dtype=dtype, device="meta")
    cache = Cache(spec, batch=batch, capacity=past + tokens, dtype=dtype, device="meta")
    cache.lengths = (past,) * batch
    recorder = Recorder()
    ids = torch.zeros(batch, tokens, dtype=torch.long, device="meta")
    source = source_of(model, ids) if past == 0 else {}
    cache.source_tokens = past + tokens
    with recorder, WholeAttention(recorder):
        model(ids, **source, cache=cache, last=True)[:, -1].argmax(-1)
    return Trace(tuple(recorder.calls))
