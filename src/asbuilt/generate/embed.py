"""Sentence embeddings: a model's hidden states, pooled over tokens into one vector per sentence.

Reimers & Gurevych 2019 (arXiv 1908.10084), section 3: mean pooling over valid tokens; the files beside the weights
state which pooling a model was trained with (`asbuilt.generate.pooling`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from asbuilt.checkpoint.load import as_source, headers, load
from asbuilt.checkpoint.source import Source
from asbuilt.errors import InputError
from asbuilt.generate.finite import require_vectors
from asbuilt.generate.pooling import LIST, Pooling, read_pooling
from asbuilt.nn.model import Model

if TYPE_CHECKING:
    from asbuilt.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)
BATCH = 32  # sentences per batch, sorted by length


def embed(
    source: Source | str | Path,
    sentences: Sequence[str],
    *,
    pooling: Pooling | None = None,
    prompt: str | None = None,
    prompt_name: str | None = None,
) -> Tensor:
    """Returns one vector per sentence (n, d_model) in float32; dot products of normalised ones are cosines.

    `pooling` None means that of the folder, else the normalised mean. `prompt` is prepended to each sentence, or the
    folder's prompt named `prompt_name`, or the folder's default prompt. Raises InputError for a model that does not
    state its pooling or has no tokenizer, for invalid sentences, and for vectors that are not finite.
    """
    source = as_source(source)
    _check(source, sentences)
    pooling = read_pooling(source.path, source.spec.d_model) if pooling is None else pooling
    prompt = pooling.prompt(prompt_name) if prompt is None else prompt
    tokenizer = source.tokenizer()
    if tokenizer is None:
        raise InputError("has no tokenizer", field="MODEL", value=source.name, fix="give a folder with tokenizer.json")
    limit = min(source.spec.max_positions, pooling.max_tokens or tokenizer.max_tokens or source.spec.max_positions)
    ids = [_ids(tokenizer, _normalised(prompt + text, pooling), limit) for text in sentences]
    _check_ids(source, ids)
    skip = 0 if pooling.include_prompt or not prompt else _prompt_length(tokenizer, _normalised(prompt, pooling))
    return embed_ids(load(source, "float32"), ids, pooling, skip)


def _check(source: Source, sentences: Sequence[str]) -> None:
    spec = source.spec
    if "tokens" not in spec.reads:
        raise InputError("reads images", field="MODEL", value=source.name, allowed="a text encoder")
    pools = source.kind == "folder" and source.path is not None and os.path.lexists(source.path / LIST)
    if "source" in spec.reads or (spec.decodes and not pools):
        raise InputError(
            "is a causal language model, not a sentence encoder",
            field="MODEL",
            value=source.name,
            allowed=f"an encoder's folder, such as all-MiniLM-L6-v2, or one with a {LIST} that states the pooling",
        )
    headers(source)  # raises if there are no weights
    if isinstance(sentences, str) or len(sentences) == 0:
        raise InputError(field="sentences", allowed="a list of at least one string")
    for i, sentence in enumerate(sentences):
        if not isinstance(sentence, str) or not sentence.strip():
            raise InputError(field=f"sentences.{i}", value=sentence, allowed="a string that is not empty")


def _check_ids(source: Source, ids: list[list[int]]) -> None:
    for i, row in enumerate(ids):
        beyond = next((id_ for id_ in row if id_ >= source.spec.n_vocab), None)
        if beyond is not None:
            raise InputError(
                "the tokenizer returned an id outside the model's vocabulary",
                field=f"sentences.{i}",
                value=beyond,
                allowed=f"below {source.spec.n_vocab}",
            )


@torch.inference_mode()
def embed_ids(model: Model, ids: Sequence[Sequence[int]], pooling: Pooling, skip: int = 0) -> Tensor:
    """Returns one vector for each list of token ids, in order, excluding the first `skip` tokens from pooling.

    Raises InputError for vectors that are not finite.
    """
    vectors: list[Tensor] = [torch.empty(0)] * len(ids)
    by_length = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    for start in range(0, len(ids), BATCH):
        rows = by_length[start : start + BATCH]
        for i, vector in zip(rows, _pooled(model, [ids[i] for i in rows], pooling, skip), strict=True):
            vectors[i] = vector
    made = torch.stack(vectors)
    require_vectors(made, model, [f"sentence {i + 1}" for i in range(len(made))])
    return made


def _pooled(model: Model, rows: list[Sequence[int]], pooling: Pooling, skip: int) -> Tensor:
    lengths = torch.tensor([len(row) for row in rows])
    longest = int(lengths.max())
    tokens_BT = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
    valid_BT = torch.arange(longest) < lengths[:, None]
    states_BTM = model.states(tokens_BT, valid_BT=None if bool(valid_BT.all()) else valid_BT)
    valid_BT[:, :skip] = False
    if not bool(valid_BT.any(1).all()):
        raise InputError("the prompt leaves no token to pool", field="prompt", fix="shorten it")
    return pooling.vectors(states_BTM, valid_BT)


def _normalised(text: str, pooling: Pooling) -> str:
    """Returns the text as it is encoded: stripped of surrounding spaces, as in sentence-transformers."""
    return text.strip().lower() if pooling.lower else text.strip()


def _ids(tokenizer: Tokenizer, sentence: str, limit: int) -> list[int]:
    """Returns the sentence's ids with special tokens; a long one is truncated, but keeps its closing tokens."""
    opening, plain, closing = tokenizer.wrapped(sentence)
    room = limit - len(opening) - len(closing)
    if room < 1:
        raise InputError(
            "the tokenizer's special tokens leave no room for the text",
            field="sentences",
            value=len(opening) + len(closing),
            allowed=f"fewer than {limit} tokens",
        )
    if not plain:
        raise InputError("the tokenizer returned no token for this text", field="sentences", value=sentence)
    if len(plain) > room:
        n = len(opening) + len(plain) + len(closing)
        log.warning(f"a text of {n} tokens is truncated to the model's {limit}")
    return opening + plain[:room] + closing


def _prompt_length(tokenizer: Tokenizer, prompt: str) -> int:
    """Returns how many tokens of a text belong to its prompt: those of the prompt alone, minus a closing one."""
    ids = [id_ for part in tokenizer.wrapped(prompt) for id_ in part]
    return len(ids) - (len(ids) > 0 and tokenizer.is_special(ids[-1]))
