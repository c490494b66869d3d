"""The same taps on a folder that transformers runs: what its modules give, under the paths of ours that mean the same.

No list of names says which module is which: the folder's own tensors do. A module of ours and one of theirs that hold
the same tensors, all of them and no others, are taken for the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from asbuilt.errors import InputError
from asbuilt.families import load_config_file, tensor_table
from asbuilt.families.shared.table import Entry, Table, respelled
from asbuilt.inspect.diff import Difference, relative
from asbuilt.inspect.taps import activations
from asbuilt.nn.model import Model


def diff_transformers(model: Model, folder: Path, family: str, tokens_BT: Tensor) -> list[Difference]:
    """Returns the differences between our `model` and what transformers makes of the checkpoint `folder`.

    In the order of our computation, the logits last (path ""), of all places that both have. Raises InputError where
    transformers is not installed, or cannot run the folder.
    """
    reference = _load(folder)
    ours, theirs = ([name for name, _ in side.named_modules()] for side in (model, reference))
    places = matched(tensor_table(family, model.spec), ours, theirs, base=f"{reference.base_model_prefix}.")
    with _theirs(folder):
        expected = _activations(reference, places, tokens_BT)
    given = activations(model, tokens_BT)
    return [Difference(path=at, relative=relative(x, expected[at])) for at, x in given.items() if at in expected]


def first_divergence(found: list[Difference], tolerance: float) -> Difference | None:
    """Returns the first difference that later ones do not take back; None where the logits agree.

    A place may mean something else on the other side (an embedding before it is scaled, a router's scores before the
    softmax): what the next block reads is then the same all the same.
    """
    if not found or not found[-1].beyond(tolerance):
        return None
    blocks = [_block(place.path) for place in found]
    read = {block: i for i, block in reversed([*enumerate(blocks)])}
    agreed = -1
    for i, (place, block) in enumerate(zip(found, blocks, strict=True)):
        if block and (place.path == block or read[block] == i) and not place.beyond(tolerance):
            agreed = i
    return next(place for place in found[agreed + 1 :] if place.beyond(tolerance))


def _block(path: str) -> str:
    """The block that a path lies in; empty outside of blocks."""
    stem, found, rest = path.rpartition("blocks.")
    return f"{stem}{found}{rest.partition('.')[0]}" if found else ""


def matched(table: Table, ours: Iterable[str], theirs: Iterable[str], base: str = "model.") -> dict[str, str]:
    """Returns our path -> their module's name, for every two modules that hold the same tensors of the table.

    Names may be written in any of the table's ways, or lie in the module `base` although they do not say so.
    """
    known = set(theirs)
    entries = max(_spelled(table, base), key=lambda entries: sum(_place(entry, known).count(".") for entry in entries))
    places = [_place(entry, known) for entry in entries]
    found: dict[str, str] = {}
    for path in ours:
        inside = [i for i, entry in enumerate(entries) if any(_within(p, path) for p in entry.paths)]
        if path and inside and all(_within(p, path) for i in inside for p in entries[i].paths):
            name = _common([places[i] for i in inside])
            if name and inside == [i for i, place in enumerate(places) if _within(place, name)]:
                found[path] = name
    return found


def _spelled(table: Table, base: str) -> list[tuple[Entry, ...]]:
    """The table's entries in every way that its family's files begin their names, with and without a first word."""
    ways = [(), *table.spellings, ((table.prefix, ""),), (("", base),)]
    return [respelled(table.entries, way) for way in ways]


def _place(entry: Entry, known: set[str]) -> str:
    """The innermost of their modules that all the entry's tensors lie in; empty where it is the whole model."""
    name = _common([name.rpartition(".")[0] for name in entry.names])
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name


def _common(names: list[str]) -> str:
    """The beginning that all names share, in whole words."""
    words = zip(*(name.split(".") for name in names), strict=False)
    return ".".join(same[0] for same in takewhile(lambda at: len(set(at)) == 1, words))


def _within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def _load(folder: Path) -> Any:  # noqa: ANN401  # a class that is looked up by name
    try:
        import transformers
    except ImportError as error:
        raise InputError("is not installed", field="transformers", fix="pip install 'asbuilt[dev]'") from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    architectures = load_config_file(folder / "config.json").get("architectures") or []
    kind = getattr(transformers, str(architectures[0]), None) if architectures else None
    with _theirs(folder):
        return (
            (kind or transformers.AutoModelForCausalLM)
            .from_pretrained(
                folder,
                dtype=torch.float32,
                attn_implementation="eager",
                experts_implementation="eager",
                trust_remote_code=False,
            )
            .eval()
        )


@contextmanager
def _theirs(folder: Path) -> Iterator[None]:
    """What transformers finds wrong with a folder has an exception of its own each time; here it is one message."""
    try:
        yield
    except Exception as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(f"transformers cannot run it: {said}", field="MODEL", value=str(folder)) from error


@torch.inference_mode()
def _activations(model: Any, places: dict[str, str], tokens_BT: Tensor) -> dict[str, Tensor]:  # noqa: ANN401
    """What the modules at `places` give, by our paths; the logits' path is empty."""
    seen: dict[str, Tensor] = {}

    def keep(path: str, module: nn.Module, args: object, output: Any) -> None:  # noqa: ANN401
        first = output[0] if isinstance(output, tuple | list) else output
        if isinstance(first, Tensor):
            seen[path] = first.detach()

    for path, name in places.items():
        model.get_submodule(name).register_forward_hook(partial(keep, path))
    beside = {"decoder_input_ids": tokens_BT} if model.config.is_encoder_decoder else {}
    seen[""] = model(input_ids=tokens_BT, return_dict=False, **beside)[0]
    return seen
