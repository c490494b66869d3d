"""Sentences as vectors: what an encoder makes of each, pooled over its tokens, so that nearness is likeness.

Reimers & Gurevych 2019 (arXiv 1908.10084), section 3: mean pooling over real tokens; their `modules.json` says
which pooling a model was trained with, whether vectors are normalised, and how many tokens are read.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from asbuilt.checkpoint.load import as_source, headers, load
from asbuilt.checkpoint.source import Source
from asbuilt.errors import InputError
from asbuilt.nn.modules import Model

if TYPE_CHECKING:
    from asbuilt.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)
BATCH = 32  # sentences read at once, those of like length together
LARGEST_FILE = 2**20
MODES = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "first"}


@dataclass(frozen=True, kw_only=True)
class Pooling:
    """How a text's tokens become one vector: their mean, or the first of them; of at most `max_tokens`."""

    how: Literal["mean", "first"] = "mean"
    normalise: bool = True
    max_tokens: int | None = None


def embed(source: Source | str | Path, sentences: Sequence[str], *, pooling: Pooling | None = None) -> Tensor:
    """Returns one vector for each sentence (n, d_model) in float32; products of normalised ones are cosines.

    `pooling` None means what the folder says, else the normalised mean. Raises InputError for a model that is no
    encoder or has no tokenizer, and for sentences that are none.
    """
    source = as_source(source)
    _check(source, sentences)
    pooling = read_pooling(source.path) if pooling is None else pooling
    tokenizer = source.tokenizer()
    if tokenizer is None:
        raise InputError("has no tokenizer", field="MODEL", value=source.name, fix="give a folder with tokenizer.json")
    limit = min(source.spec.max_positions, pooling.max_tokens or source.spec.max_positions)
    ids = [_ids(tokenizer, sentence, limit) for sentence in sentences]
    return embed_ids(load(source, "float32"), ids, pooling)


def _check(source: Source, sentences: Sequence[str]) -> None:
    spec = source.spec
    if spec.n_vocab == 0:
        raise InputError("reads images", field="MODEL", value=source.name, allowed="an encoder of texts")
    if spec.decodes or spec.encoder is not None:
        raise InputError("continues texts, and does not read them as a whole", field="MODEL", value=source.name,
                         allowed="a folder of an encoder, such as all-MiniLM-L6-v2's")  # fmt: skip
    headers(source)  # says so where there are no weights
    if isinstance(sentences, str) or len(sentences) == 0:
        raise InputError("no sentences", field="sentences", allowed="a list of at least one text")
    for i, sentence in enumerate(sentences):
        if not isinstance(sentence, str) or not sentence.strip():
            raise InputError("nothing to read", field=f"sentences.{i}", value=sentence, allowed="a text")


@torch.inference_mode()
def embed_ids(model: Model, ids: Sequence[Sequence[int]], pooling: Pooling) -> Tensor:
    """Returns one vector for each list of token ids, in their order."""
    vectors = torch.empty(len(ids), model.spec.d_model)
    by_length = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    for start in range(0, len(ids), BATCH):
        rows = by_length[start : start + BATCH]
        vectors[rows] = _pooled(model, [ids[i] for i in rows], pooling)
    return vectors


def _pooled(model: Model, rows: list[Sequence[int]], pooling: Pooling) -> Tensor:
    lengths = torch.tensor([len(row) for row in rows])
    longest = int(lengths.max())
    tokens_BT = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
    valid_BT = torch.arange(longest) < lengths[:, None]
    states_BTM = model.states(tokens_BT, valid_BT=None if bool(valid_BT.all()) else valid_BT)
    if pooling.how == "first":
        vectors_BM = states_BTM[:, 0]
    else:
        vectors_BM = (states_BTM * valid_BT[:, :, None]).sum(1) / lengths[:, None]
    return F.normalize(vectors_BM, dim=-1) if pooling.normalise else vectors_BM


def _ids(tokenizer: Tokenizer, sentence: str, limit: int) -> list[int]:
    """The sentence's ids, wrapped as the model expects; a longer one loses its end, but not what closes it."""
    wrapped = tokenizer.encode(sentence, wrap=True)
    if len(wrapped) <= limit:
        return wrapped
    log.warning(f"a text of {len(wrapped)} tokens is cut to {limit}, which is what the model reads")
    plain = tokenizer.encode(sentence)
    start = next(i for i in range(len(wrapped)) if wrapped[i : i + len(plain)] == plain)
    closing = wrapped[start + len(plain) :]
    return wrapped[: limit - len(closing)] + closing


def read_pooling(folder: Path | None) -> Pooling:
    """Returns what a folder's `modules.json` says, the normalised mean where there is none.

    Raises InputError for a step that is not known.
    """
    if folder is None or not (folder / "modules.json").is_file():
        return Pooling()
    how, normalise = "mean", False
    for module in _json(folder / "modules.json", list):
        kind = str(module.get("type", "")).rsplit(".", 1)[-1] if isinstance(module, dict) else module
        if kind == "Pooling":
            how = _mode(folder / _inside(folder, module.get("path")) / "config.json")
        elif kind == "Normalize":
            normalise = True
        elif kind != "Transformer":
            raise InputError("unknown step after the encoder", field=f"{folder.name}/modules.json", value=kind,
                             allowed="Transformer, Pooling, Normalize")  # fmt: skip
    return Pooling(how=how, normalise=normalise, max_tokens=_max_tokens(folder))  # type: ignore[arg-type]


def _inside(folder: Path, path: object) -> str:
    """A folder's name that stays in `folder`."""
    if not isinstance(path, str) or Path(path).name != path or path in ("", ".", ".."):
        raise InputError("not a folder's name", field=f"{folder.name}/modules.json: path", value=path)
    return path


def _mode(path: Path) -> str:
    said = _json(path, dict)
    chosen = [key for key, value in said.items() if key.startswith("pooling_mode_") and value is True]
    if len(chosen) != 1 or chosen[0] not in MODES:
        raise InputError("unknown pooling", field=str(path), value=chosen, allowed=", ".join(MODES))
    return MODES[chosen[0]]


def _max_tokens(folder: Path) -> int | None:
    path = folder / "sentence_bert_config.json"
    most = _json(path, dict).get("max_seq_length") if path.is_file() else None
    if most is not None and not (type(most) is int and most >= 3):
        raise InputError("not allowed", field=f"{path}: max_seq_length", value=most, allowed="a whole number from 3")
    return most


def _json(path: Path, kind: type) -> Any:  # noqa: ANN401
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise InputError("too large", field=str(path), allowed=f"{LARGEST_FILE} bytes")
        said = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot be read: {error}", field=str(path)) from error
    if not isinstance(said, kind):
        raise InputError("of another kind", field=str(path), allowed=f"a JSON {kind.__name__}")
    return said
