"""The option `draft` of `asbuilt.generate`: a word, a model or a path, and the memory that drafting takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from asbuilt import cost
from asbuilt.checkpoint.given import source_of
from asbuilt.checkpoint.load import Contents, load
from asbuilt.errors import InputError
from asbuilt.generate import compute as computing
from asbuilt.generate.draft import Drafter, DraftModel, Predictors, PromptLookup, check_pair, require_steady
from asbuilt.nn.model import Model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asbuilt.checkpoint.given import Given
    from asbuilt.checkpoint.source import Source
    from asbuilt.spec import Model as Spec
    from asbuilt.text.tokenizer import Tokenizer

WORDS: dict[str, type[Drafter]] = {"own": Predictors, "prompt": PromptLookup}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a request says of drafts: what makes them, if it needs no loading, or the source of a draft model."""

    drafter: Drafter | None = None
    source: Source | None = None
    count: int | None = None

    @property
    def given(self) -> bool:
        """Whether anything drafts."""
        return self.drafter is not None or self.source is not None

    def check(self, model: Spec) -> None:
        """Raises InputError unless it can draft for this model, before anything is loaded."""
        if self.given:
            require_steady(model)
        if self.drafter is not None:
            self.drafter.check(model)
        if self.source is not None:
            check_pair(model, self.source.spec)

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
        if not isinstance(self.drafter, Predictors):
            return 0
        name = str(dtype).removeprefix("torch.")
        with_them, without = (cost.cache(model, prompt + new, name, predictors=one).at_seq for one in (True, False))
        return (
            with_them - without + 2 * (prompt + new) * model.stream_width * dtype.itemsize
        )  # streams, before and after

    def loaded(self, dtype: torch.dtype) -> Drafter | None:
        """Returns what drafts, its model loaded in this dtype."""
        return self.drafter if self.source is None else DraftModel(load(self.source, dtype), self.count)


def asked(draft: Given | Drafter | None, count: int | None) -> Asked:
    """Returns what `draft` says: "own", "prompt", what makes drafts, a built model, or what has the weights of one."""
    if draft is None:
        if count is not None:
            raise InputError("nothing drafts", field="draft_tokens", value=count, fix="say what does: draft")
        return Asked()
    if isinstance(draft, Drafter):
        if count is not None:
            raise InputError("said by what drafts", field="draft_tokens", value=count, fix="leave it out")
        return Asked(drafter=draft)
    if isinstance(draft, str) and draft in WORDS:
        return Asked(drafter=WORDS[draft](count))
    if isinstance(draft, Model):
        return Asked(drafter=DraftModel(draft, count))
    if isinstance(draft, nn.Module):
        raise InputError(field="draft", value=type(draft).__name__, allowed="a model that `build` or `load` returned")
    Drafter(count)  # raises for a count that it cannot be
    return Asked(source=source_of(draft, weights=True), count=count)
