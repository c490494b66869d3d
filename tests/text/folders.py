"""Small tokenizer folders, made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LETTERS = "abcdefgh "


def added(id_: int, content: str, **more: object) -> dict[str, Any]:
    """An entry of `added_tokens`."""
    said = {"id": id_, "content": content, "single_word": False, "lstrip": False, "rstrip": False}
    return said | {"normalized": False, "special": True} | more


def around(single: list[str], ids: dict[str, int]) -> dict[str, Any]:
    """A post-processor that puts tokens around a text, `$A`."""

    def piece(name: str) -> dict[str, Any]:
        kind, name = ("Sequence", "A") if name == "$A" else ("SpecialToken", name)
        return {kind: {"id": name, "type_id": 0}}

    specials = {name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in ids}
    pieces = [piece(name) for name in single]
    return {"type": "TemplateProcessing", "single": pieces, "pair": pieces, "special_tokens": specials}


def tokenizer_json(**more: Any) -> dict[str, Any]:  # noqa: ANN401
    """One token for each of a few letters; `more` are other parts of the file."""
    model = {"type": "BPE", "vocab": {letter: i for i, letter in enumerate(LETTERS)}, "merges": []}
    parts = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    return {"version": "1.0", "added_tokens": [], "model": model} | dict.fromkeys(parts) | more


def write(folder: Path, tokenizer: dict[str, Any] | str, **files: object) -> Path:
    """Writes tokenizer.json, and each of `files` as JSON under its name, `.json` left out."""
    folder.mkdir(exist_ok=True)
    text = tokenizer if isinstance(tokenizer, str) else json.dumps(tokenizer)
    (folder / "tokenizer.json").write_text(text)
    for name, said in files.items():
        (folder / f"{name}.json").write_text(json.dumps(said))
    return folder
