"""Language models that hear sounds in a text.

Shapes: batch B, new tokens T, sounds N, tokens of a sound P, model width M.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from asbuilt.nn.audio import Sounds
from asbuilt.nn.hearing import Heard, Hearing
from asbuilt.nn.language_model import LanguageModel
from asbuilt.nn.registry import computes
from asbuilt.nn.step import Step
from asbuilt.spec import audio_language_model as spec
from asbuilt.spec.part import Kernel

if TYPE_CHECKING:
    from asbuilt.nn.cache import Cache


@computes(spec.AudioLanguageModel)
class AudioLanguageModel(LanguageModel):
    """Tokens to logits, with sounds in place of some tokens."""

    hearing: Hearing

    def forward(
        self,
        tokens_BT: Tensor,
        *,
        cache: Cache | None = None,
        valid_BT: Tensor | None = None,
        audio: Tensor | Sounds | None = None,
        reach: tuple[int, ...] | None = None,
        last: bool = False,
        kernel: Kernel = "fused",
        **unread: Any,  # noqa: ANN401  # what no forward reads
    ) -> Tensor:
        """Returns logits (B, T, n_vocab), or (B, 1, n_vocab) of each row's last valid token if `last`.

        `audio` are log-mel spectrograms (N, bands, frames) in the order of their placeholders, or sounds of several
        lengths. Raises InputError for spectrograms that do not fit.
        """
        self.refuse(unread)
        heard = None if audio is None else self.hearing.heard(audio, kernel)
        step = self.begin((tokens_BT.shape[0], tokens_BT.shape[1]), tokens_BT.device, cache, valid_BT, kernel, reach)
        if heard is not None:
            step.images_NPM, step.sounds = heard.made, heard.tokens
        return self.run(tokens_BT, step, last)

    def looked_up(self, tokens_BT: Tensor, step: Step) -> Tensor:
        """Returns (B, T, M): the token embedding, with placeholders replaced by sounds."""
        x_BTM = self.embedding(self.hearing.without_placeholders(tokens_BT, self.spec.n_vocab), step)
        if step.images_NPM is None:
            return x_BTM
        made = step.images_NPM
        return self.hearing.put(x_BTM, tokens_BT, Heard(made, step.sounds or (self.hearing.part.n_tokens,) * len(made)))

    def known(self, tokens_BT: Tensor) -> Tensor:
        """Returns token 0, padding, for the placeholders of sounds."""
        return tokens_BT.masked_fill(tokens_BT == self.hearing.part.placeholder, 0)

    def images_by_row(self, tokens_BT: Tensor, step: Step) -> list[Tensor] | None:
        """Returns the sounds of each row (n, P, M) in this pass, None without sounds."""
        if step.images_NPM is None:
            return None
        counts = (tokens_BT == self.hearing.part.placeholder).sum(1) // self.hearing.part.n_tokens
        return [*step.images_NPM.split(counts.tolist())]
