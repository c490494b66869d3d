"""The same taps on a folder run by transformers: its modules' outputs, under the corresponding asbuilt paths.

Modules are matched by the folder's tensors rather than by a list of names: an asbuilt module and a transformers module
that hold exactly the same tensors correspond.
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
from asbuilt.families.shared.table import Entry, TensorTable, respelled
from asbuilt.inspect.diff import Difference, relative
from asbuilt.inspect.taps import activations
from asbuilt.nn.fixed_inputs import source_of
from asbuilt.nn.model import Model


def diff_transformers(model: Model, folder: Path, family: str, tokens_BT: Tensor) -> list[Difference]:
    """Returns the differences between asbuilt's `model` and transformers' model of the checkpoint `folder`.

    They cover all paths that both have, in the order of asbuilt's computation, the logits last (path ""). Raises
    InputError if transformers is not installed, or cannot run the folder.
    """
    reference = _load(folder)
    ours, theirs = ([name for name, _ in side.named_modules()] for side in (model, reference))
    places = matched(tensor_table(family, model.spec), ours, theirs, base=f"{reference.base_model_prefix}.")
    with _theirs(folder):
        expected = _activations(reference, places, tokens_BT, source_of(model, tokens_BT).get("audio"))
    given = activations(model, tokens_BT)
    alike = {at: _as_wide(expected[at], x) for at, x in given.items() if at in expected}
    return [Difference(path=at, relative=relative(given[at], other)) for at, other in alike.items()]


def _as_wide(other: Tensor, x: Tensor) -> Tensor:
    """Returns transformers' activations with all residual streams of a token in one vector, as asbuilt's are.

    Streams are its third dimension, or its first.
    """
    if other.dim() != 4 or x.dim() != 3:
        return other
    return (other if other.shape[:2] == x.shape[:2] else other.permute(1, 2, 0, 3)).flatten(2)


def first_divergence(found: list[Difference], tolerance: float) -> Difference | None:
    """Returns the first difference from which the models do not converge again; None if the logits agree.

    An output may be taken at another point on the other side (an embedding before scaling, a router's scores before the
    softmax) although the next block's input is the same.
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
    """Returns the block that a path belongs to; empty outside the blocks."""
    stem, found, rest = path.rpartition("blocks.")
    return f"{stem}{found}{rest.partition('.')[0]}" if found else ""


def matched(table: TensorTable, ours: Iterable[str], theirs: Iterable[str], base: str = "model.") -> dict[str, str]:
    """Returns asbuilt path -> transformers module, for all pairs that hold the same tensors of the table.

    Names may have any of the table's spellings, and may omit the prefix of the module `base`.
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


def _spelled(table: TensorTable, base: str) -> list[tuple[Entry, ...]]:
    """Returns the table's entries in every spelling of its family's files, with and without the first word."""
    ways = [(), *table.spellings, ((table.prefix, ""),), (("", base),)]
    return [respelled(table.entries, way) for way in ways]


def _place(entry: Entry, known: set[str]) -> str:
    """Returns the innermost transformers module with all the entry's tensors; empty if that is the whole model."""
    name = _common([name.rpartition(".")[0] for name in entry.names])
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name


def _common(names: list[str]) -> str:
    """Returns the common prefix of all names, in whole words."""
    words = zip(*(name.split(".") for name in names), strict=False)
    return ".".join(same[0] for same in takewhile(lambda at: len(set(at)) == 1, words))


def _within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def _load(folder: Path) -> Any:  # noqa: ANN401  # the class is looked up by name
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
    """Turns the various exceptions of transformers about a folder into one InputError."""
    try:
        yield
    except Exception as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(f"transformers cannot run this model: {said}", field="MODEL", value=str(folder)) from error


@torch.inference_mode()
def _activations(
    model: Any,  # noqa: ANN401
    places: dict[str, str],
    tokens_BT: Tensor,
    audio: Tensor | None,
) -> dict[str, Tensor]:
    """Returns the outputs of the modules at `places`, by asbuilt paths; the logits' path is empty."""
    seen: dict[str, Tensor] = {}

    def keep(path: str, module: nn.Module, args: object, output: Any) -> None:  # noqa: ANN401
        first = output[0] if isinstance(output, tuple | list) else output
        if isinstance(first, Tensor):
            seen[path] = first.detach()

    for path, name in places.items():
        model.get_submodule(name).register_forward_hook(partial(keep, path))
    given = {"input_ids": tokens_BT} if audio is None else {"input_features": audio}
    given |= {"decoder_input_ids": tokens_BT} if model.config.is_encoder_decoder else {}
    seen[""] = model(**given, return_dict=False)[0]
    return seen
