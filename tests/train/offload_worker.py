"""Steps each optimizer on a device that has no numbers, only a name, and prints where its tensors lie as JSON."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from asbuilt import build, decoder
from asbuilt.train.optimizer import optimizers
from asbuilt.train.settings import Optimizer

DEVICE = "npy"


def places(name: Any, offload: bool) -> dict[str, list[str]]:  # noqa: ANN401
    """The devices of what is stepped."""
    spec = decoder(d_model=64, n_layers=1, n_heads=2, n_vocab=128)
    with FakeTensorMode():
        model = build(spec, seed=None, device=DEVICE)
        made = optimizers(model, Optimizer(name=name), offload=offload)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        made.step(0.5, torch.ones((), device=DEVICE))
        states = [state for _, state in made.states()]
        found = {
            "state": [x for state in states for x in state.values() if isinstance(x, Tensor) and x.dim()],
            "weights": list(model.parameters()),
            "gradients": [p.grad for p in model.parameters() if p.grad is not None],
            "owners": [owner for owner, _ in made.states()],
        }
        return {key: sorted({x.device.type for x in tensors}) for key, tensors in found.items()}


if __name__ == "__main__":
    _setup_privateuseone_for_python_backend(DEVICE)
    names = ("adamw", "sgd", "muon")  # the others read numbers
    print(json.dumps({"without": places("adamw", False)} | {name: places(name, True) for name in names}))
