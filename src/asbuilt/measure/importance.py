"""How much each input of a linear map matters: the mean square of its values while a model reads a text.

An error e in a column of W changes the map's output by e times that input, so on a text its square weighs as much as
the mean square of the input. llama.cpp calls all of these a model's importance matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from asbuilt.errors import InputError
from asbuilt.measure.loss import windows
from asbuilt.nn.experts import MixtureOfExperts
from asbuilt.nn.linear import Linear
from asbuilt.nn.model import Model


class _Sums:
    """Sums of squares by path of a weight, and of how many rows they are."""

    def __init__(self) -> None:
        self.squares: dict[str, Tensor] = {}
        self.rows: dict[str, Tensor] = {}

    def add(self, path: str, squares: Tensor, rows: Tensor) -> None:
        """Adds sums (..., I) of so many rows (...)."""
        self.squares[path] = self.squares.get(path, 0.0) + squares.double()
        self.rows[path] = self.rows.get(path, 0) + rows

    def of_map(self, path: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        """Returns the hook of a linear map."""

        def keep(module: nn.Module, given: tuple[Tensor, ...]) -> None:
            x = given[0].flatten(0, -2).float()
            self.add(path, x.square().sum(0), torch.tensor(len(x)))

        return keep

    def of_experts(self, path: str) -> Callable[[str, Tensor, list[int]], None]:
        """Returns what a mixture of experts tells its rows, sorted by expert."""

        def keep(name: str, x: Tensor, counts: list[int]) -> None:
            squares = [one.float().square().sum(0) for one in x.split(counts)]
            self.add(f"{path}.{name}", torch.stack(squares), torch.tensor(counts))

        return keep


@torch.inference_mode()
def importance(model: Model, ids: Sequence[int], first: int | None = None) -> dict[str, Tensor]:
    """Returns the mean squares of the inputs of each linear map, by its weight's path: (I), of stacks (E, I).

    The text is read in windows as `nats_per_token` does. Maps that no row went through are left out, and an expert
    that was not chosen has ones. Raises InputError where an input is NaN or infinite.
    """
    sums, handles = _Sums(), []
    mixtures = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    try:
        for path, module in model.named_modules():
            if isinstance(module, Linear):
                handles.append(module.register_forward_pre_hook(sums.of_map(f"{path}.weight")))
            elif isinstance(module, MixtureOfExperts):
                module.watch = sums.of_experts(path)
        for tokens in windows(ids, first):
            model(tokens)
    finally:
        for handle in handles:
            handle.remove()
        for module in mixtures:
            module.watch = None
    found = {path: _mean(sums.squares[path], sums.rows[path]) for path in sums.squares}
    wrong = next((path for path, mean in found.items() if not bool(mean.isfinite().all())), None)
    if wrong is not None:
        raise InputError("has an input that is NaN or infinite", field=wrong, fix="compute in float32")
    return found


def _mean(squares: Tensor, rows: Tensor) -> Tensor:
    mean = squares / rows.clamp(min=1)[..., None]
    return torch.where(rows[..., None] > 0, mean, 1.0).float()
