"""One description of a transformer, and what follows from it: costs, the model, checkpoints, caches, measurements.

The public names below are imported on first use, so `import asbuilt` does not import torch. This file imports nothing
at all, because `python -m asbuilt` runs it while the current directory is still on the import path.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from asbuilt import catalog, cost, families, spec
    from asbuilt.api.diff import diff
    from asbuilt.api.generate import generate
    from asbuilt.api.typed import measure, plan, train
    from asbuilt.checkpoint.convert import convert
    from asbuilt.checkpoint.load import load
    from asbuilt.checkpoint.save import save
    from asbuilt.checkpoint.save_adapter import save_adapter
    from asbuilt.checkpoint.source import Source, open_model
    from asbuilt.description import Description, describe
    from asbuilt.errors import InputError
    from asbuilt.generate.embed import embed
    from asbuilt.generate.sampling import Sampling
    from asbuilt.generate.text import complete
    from asbuilt.nn.build import build
    from asbuilt.registering import register
    from asbuilt.spec.decoder import decoder

# name -> (module, attribute), or the module itself if there is no attribute. `generate`, `measure`, `plan` and `train`
# are callable packages (asbuilt.packages): both asbuilt.plan(model, gpu=...) and asbuilt.plan.serve work.
PUBLIC: dict[str, tuple[str, str]] = {
    "Description": ("asbuilt.description", "Description"),
    "InputError": ("asbuilt.errors", "InputError"),
    "Sampling": ("asbuilt.generate.sampling", "Sampling"),
    "Source": ("asbuilt.checkpoint.source", "Source"),
    "build": ("asbuilt.nn.build", "build"),
    "catalog": ("asbuilt.catalog", ""),
    "complete": ("asbuilt.generate.text", "complete"),
    "convert": ("asbuilt.checkpoint.convert", "convert"),
    "cost": ("asbuilt.cost", ""),
    "decoder": ("asbuilt.spec.decoder", "decoder"),
    "describe": ("asbuilt.description", "describe"),
    "diff": ("asbuilt.api.diff", "diff"),
    "embed": ("asbuilt.generate.embed", "embed"),
    "families": ("asbuilt.families", ""),
    "generate": ("asbuilt.generate", ""),
    "load": ("asbuilt.checkpoint.load", "load"),
    "measure": ("asbuilt.measure", ""),
    "open_model": ("asbuilt.checkpoint.source", "open_model"),
    "plan": ("asbuilt.plan", ""),
    "register": ("asbuilt.registering", "register"),
    "save": ("asbuilt.checkpoint.save", "save"),
    "save_adapter": ("asbuilt.checkpoint.save_adapter", "save_adapter"),
    "spec": ("asbuilt.spec", ""),
    "train": ("asbuilt.train", ""),
}

__all__ = [
    "Description",
    "InputError",
    "Sampling",
    "Source",
    "build",
    "catalog",
    "complete",
    "convert",
    "cost",
    "decoder",
    "describe",
    "diff",
    "embed",
    "families",
    "generate",
    "load",
    "measure",
    "open_model",
    "plan",
    "register",
    "save",
    "save_adapter",
    "spec",
    "train",
]


def __getattr__(name: str) -> object:
    if name not in PUBLIC:
        raise AttributeError(f"module 'asbuilt' has no attribute {name!r}")
    from importlib import import_module

    module, attribute = PUBLIC[name]
    found = import_module(module)
    return getattr(found, attribute) if attribute else found


def __dir__() -> list[str]:
    return sorted([*globals(), *PUBLIC])
