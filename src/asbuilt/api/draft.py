"""The option `draft` of `asbuilt.generate`: a word, a model or a path, and the memory that drafting takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from asbuilt import cost
from asbuilt.checkpoint.eagle3 import Eagle3Folder, holds_eagle3
from asbuilt.checkpoint.given import source_of
from asbuilt.checkpoint.load import Contents, load
from asbuilt.errors import InputError
from asbuilt.families.shared.eagle3 import after_blocks
from asbuilt.generate import compute as computing
from asbuilt.generate.draft import (
    Drafter,
    DraftModel,
    FusedStreams,
    Predictors,
    PromptLookup,
    check_layer,
    check_pair,
    require_steady,
)
from asbuilt.nn.model import Model
from asbuilt.spec.fused_predictor import STREAMS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asbuilt.checkpoint.given import Given
    from asbuilt.checkpoint.source import Source
    from asbuilt.spec import Model as Spec
    from asbuilt.text.tokenizer import Tokenizer

WORDS: dict[str, type[Drafter]] = {"own": Predictors, "prompt": PromptLookup}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a request says of drafts: what makes them, if it needs no loading, or a draft model's or layer's source."""

    drafter: Drafter | None = None
    source: Source | None = None
    layer: Eagle3Folder | None = None
    count: int | None = None

    @property
    def given(self) -> bool:
        """Whether anything drafts."""
        return not (self.drafter is None and self.source is None and self.layer is None)

    def check(self, model: Spec) -> None:
        """Raises InputError unless it can draft for this model, before anything is loaded."""
        if self.given:
            require_steady(model)
        if self.drafter is not None:
            self.drafter.check(model)
        if self.source is not None:
            check_pair(model, self.source.spec)
        if self.layer is not None:
            check_layer(model, self.layer.read.part)
            after_blocks(model.n_layers, self.layer.read.layers)

    def check_words(self, tokenizer: Tokenizer, ids: Sequence[int]) -> None:
        """Raises InputError if the draft model's tokenizer spells the prompt's tokens otherwise."""
        own = None if self.source is None else self.source.tokenizer()
        if own is not None and own.decode(ids, skip_special=False) != tokenizer.decode(ids, skip_special=False):
            raise InputError(
                "the draft model's tokens spell other words",
                field="draft",
                value=self.source.name if self.source else "",
                fix="choose a smaller model of the same family",
            )

    def needs(self, model: Spec, tokens: tuple[int, int], dtype: torch.dtype, chunk: int | None) -> int:
        """Returns the bytes that drafting needs beside the request, for a prompt and new tokens."""
        prompt, new = tokens
        if self.source is not None:
            request = computing.request_bytes(self.source.spec, prompt, new, dtype, chunk, None)
            return Contents(self.source).needs(dtype, request)
        name, tokens_bytes = str(dtype).removeprefix("torch."), (prompt + new) * dtype.itemsize
        if self.layer is not None:
            part = self.layer.read.part
            streams = tokens_bytes * (2 * STREAMS * part.d_target + part.d_model)
            return self.layer.nbytes(dtype.itemsize) + cost.cache(part, prompt + new, name).at_seq + streams
        if not isinstance(self.drafter, Predictors):
            return 0
        with_them, without = (cost.cache(model, prompt + new, name, predictors=one).at_seq for one in (True, False))
        return with_them - without + 2 * tokens_bytes * model.stream_width  # streams, before and after

    def loaded(self, model: Model) -> Drafter | None:
        """Returns what drafts for a built model, its own model or layer loaded in that one's dtype."""
        if self.layer is not None:
            table = dict(model.named_parameters()).get("embedding.weight")
            layer = self.layer.load(model.dtype, model.device, table)
            return FusedStreams(layer, after_blocks(model.spec.n_layers, self.layer.read.layers), self.count)
        return self.drafter if self.source is None else DraftModel(load(self.source, model.dtype), self.count)


def asked(draft: Given | Drafter | None, count: int | None) -> Asked:
    """Returns what `draft` says: "own", "prompt", what makes drafts, a built model, or what has the weights of one."""
    if draft is None:
        if count is not None:
            raise InputError("nothing drafts", field="draft_tokens", value=count, fix="say what does: draft")
        return Asked()
    if isinstance(draft, Drafter):
        if count is not None:
            raise InputError("the drafter has its own count", field="draft_tokens", value=count, fix="leave it out")
        return Asked(drafter=draft)
    if isinstance(draft, str) and draft in WORDS:
        return Asked(drafter=WORDS[draft](count))
    if isinstance(draft, Model):
        return Asked(drafter=DraftModel(draft, count))
    if isinstance(draft, nn.Module):
        raise InputError(field="draft", value=type(draft).__name__, allowed="a model that `build` or `load` returned")
    Drafter(count)  # raises for a count that it cannot be
    if isinstance(draft, str | Path) and holds_eagle3(draft):
        return Asked(layer=Eagle3Folder(draft), count=count)
    try:
        return Asked(source=source_of(draft, weights=True), count=count)
    except InputError as error:
        if error.field.lower() != "model":
            raise
        allowed = f"own, prompt, {error.allowed}" if error.allowed else ""
        raise InputError(error.problem, field="draft", value=error.value, allowed=allowed, fix=error.fix) from error
