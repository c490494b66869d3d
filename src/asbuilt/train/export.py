"""The exported model of a run, or its adapters, written aside and then renamed."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from asbuilt.checkpoint.save import save
from asbuilt.checkpoint.save_adapter import save_adapter
from asbuilt.checkpoint.source import Source
from asbuilt.families import Reading
from asbuilt.nn.model import Model
from asbuilt.train.recipe import Recipe
from asbuilt.train.settings import WITH_SOURCE
from asbuilt.train.text import Vocabulary

EXPORTED = "model"
ADAPTER = "adapter"  # the folder of adapters, which take the model's place


def export(recipe: Recipe, model: Model, reading: Reading, vocabulary: Vocabulary) -> Path:
    """Writes the model beside its tokenizer, in place of what was exported before; returns the folder."""
    if recipe.tune.adapters and reading.family:
        return export_adapter(recipe, model, reading.family)
    folder = Path(recipe.run.out) / EXPORTED
    with _replacing(folder) as fresh:
        beside = fresh.with_name(fresh.name + ".tokenizer")
        try:
            vocabulary.tokenizer.save(beside)
            save(
                model,
                fresh,
                family=None if recipe.tune.adapters else reading.family or None,
                carried=carried(recipe, reading, vocabulary),
                tokenizer_from=vocabulary.source
                or Source(kind="folder", name="tokenizer", reading=reading, path=beside),
            )
            for name, said in vocabulary.beside.items():
                (fresh / name).write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    return folder


def carried(recipe: Recipe, reading: Reading, vocabulary: Vocabulary) -> dict[str, Any]:
    """Returns the keys of config.json that name tokens: what ends a text, what pads, what a decoder's text begins with.

    The first two as the config said, or those of the tokenizer; the last is what the objective has begun it with.
    """
    if vocabulary.source is not None:
        return reading.carried
    said = {"eos_token_id": vocabulary.end_id, "pad_token_id": vocabulary.pad_id}
    made = reading.carried | {key: id_ for key, id_ in said.items() if reading.carried.get(key) is None}
    began = recipe.data.objective in WITH_SOURCE and vocabulary.pad_id is not None
    return made | ({"decoder_start_token_id": vocabulary.pad_id} if began else {})


def export_adapter(recipe: Recipe, model: Model, family: str) -> Path:
    """Writes the adapters in PEFT's layout, in place of what was exported before; returns the folder."""
    folder, source = Path(recipe.run.out) / ADAPTER, recipe.model.source
    base = str(Path(source).absolute()) if Path(source).exists() else source
    with _replacing(folder) as fresh:
        save_adapter(model, fresh, family=family, base=base)
    return folder


@contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """Yields the name of a folder to write, which takes the place of `folder` at the end."""
    for left in folder.parent.glob(f".{folder.name}.*"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    fresh = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.new")
    try:
        yield fresh
        if folder.exists():
            old = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.removed")
            folder.rename(old)
            fresh.rename(folder)
            shutil.rmtree(old, ignore_errors=True)
        else:
            fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
