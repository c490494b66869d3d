"""Counting what a process sends, where the collectives of its process groups are called.

A ring is assumed, as by `plan train`: each of n ranks sends (n-1)/n of what is gathered or scattered, and twice that of
what is summed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SMALLEST = 64  # bytes; sums of counts, losses and norms are smaller, and no plan has them


class Traffic(TorchDispatchMode):
    """Counts the bytes that this process sends within a `with` statement, by collective and process group."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        count = COUNTED.get(func)
        if count is not None:
            group = _group_of(args)
            name, nbytes = func.overloadpacket.__name__.strip("_"), count(args, group.size())
            if nbytes >= SMALLEST or group.size() == 1:
                self.bytes[name, group.group_desc] += round(nbytes)
        return func(*args, **(kwargs or {}))


def _group_of(args: tuple[Any, ...]) -> ProcessGroup:
    """The process group of a collective, which the functional ones name."""
    for one in args:
        if isinstance(one, torch.ScriptObject) and _group(one):
            return ProcessGroup.unbox(one)
    return _resolve_process_group([one for one in args if isinstance(one, str)][-1])  # pyright: ignore[reportArgumentType]


def _group(one: torch.ScriptObject) -> bool:
    return "ProcessGroup" in str(one._type())


def _size(of: object) -> int:
    return sum(t.numel() * t.element_size() for t in tree_leaves(of) if isinstance(t, Tensor))


def _ring(n: int) -> float:
    return (n - 1) / n


c10d = torch.ops.c10d
COUNTED: dict[Any, Callable[[tuple[Any, ...], int], float]] = {
    c10d.allreduce_.default: lambda args, n: 2 * _ring(n) * _size(args[0]),
    c10d._allgather_base_.default: lambda args, n: _ring(n) * _size(args[0]),
    c10d._reduce_scatter_base_.default: lambda args, n: _ring(n) * _size(args[1]),
    c10d.alltoall_base_.default: lambda args, n: _ring(n) * _size(args[1]),
    torch.ops._c10d_functional.all_to_all_single.default: lambda args, n: _ring(n) * _size(args[0]),
    torch.ops._c10d_functional.all_gather_into_tensor.default: lambda args, n: (n - 1) * _size(args[0]),
    torch.ops._c10d_functional.reduce_scatter_tensor.default: lambda args, n: _ring(n) * _size(args[0]),
    c10d.send.default: lambda args, n: float(_size(args[0])),
}
