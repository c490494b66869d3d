"""Language models that read images in a text, and hear sounds too.

Shapes: batch B, new tokens T, images N, tokens of an image P, model width M.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from asbuilt.errors import InputError
from asbuilt.nn.hearing import Heard, Hearing
from asbuilt.nn.language_model import LanguageModel
from asbuilt.nn.own_tokens import Mapped, OwnTokens
from asbuilt.nn.pieces import Pieces
from asbuilt.nn.registry import computes
from asbuilt.nn.step import Step
from asbuilt.nn.vision import MLPProjector, Vision
from asbuilt.spec import vision_language_model as spec
from asbuilt.spec.part import Kernel, walk
from asbuilt.spec.positions import Rotary, Sections

if TYPE_CHECKING:
    from asbuilt.nn.audio import Sounds
    from asbuilt.nn.cache import Cache
    from asbuilt.nn.image_grid import Patches
    from asbuilt.nn.tiles import Tiles


@computes(spec.VisionLanguageModel)
class VisionLanguageModel(LanguageModel):
    """Tokens to logits, with images in place of some tokens."""

    spec: spec.VisionLanguageModel  # pyright: ignore[reportIncompatibleVariableOverride]  # set once
    vision: Vision
    hearing: Hearing | None
    own_tokens: nn.ModuleList  # only where there are any

    @cached_property
    def placed(self) -> bool:
        """Whether RoPE of the text reads where in an image a token lies."""
        return any(isinstance(part, Rotary) and isinstance(part.axes, Sections) for _, part in walk(self.spec.text))

    def forward(
        self,
        tokens_BT: Tensor,
        *,
        cache: Cache | None = None,
        valid_BT: Tensor | None = None,
        images: Tensor | Patches | Pieces | Tiles | None = None,
        audio: Tensor | Sounds | None = None,
        prefix: tuple[int, ...] | None = None,
        reach: tuple[int, ...] | None = None,
        last: bool = False,
        kernel: Kernel = "fused",
        **unread: Any,  # noqa: ANN401  # what no forward reads
    ) -> Tensor:
        """Returns logits (B, T, n_vocab), or (B, 1, n_vocab) of each row's last valid token if `last`.

        `images` are (N, C, H, W) in the order of their placeholders, or (B, n, C, H, W), or pieces of pictures; or the
        patches of images of any size, or tiles, if the tower reads these. `audio` are spectrograms, if the model hears.
        `prefix` is how many tokens of each row attend to each other both ways, if the model's prefixes do: by default
        all that come with images, and none without. Raises InputError for images, sounds and prefixes that do not fit.
        """
        deaf = {} if self.hearing is not None else {"audio": audio}
        self.refuse(unread | deaf | ({} if self.vision.part.prefix else {"prefix": prefix}))
        heard = None if audio is None else self.heard(audio, kernel)
        images = images.values if isinstance(images, Pieces) else images
        seen = None if images is None else self.vision.seen(images, kernel)  # type: ignore[arg-type]  # pyright: ignore
        step = self.begin((tokens_BT.shape[0], tokens_BT.shape[1]), tokens_BT.device, cache, valid_BT, kernel, reach)
        if seen is not None:
            step.images_NPM, step.grids, step.added = seen
        if heard is not None:
            step.sounds_PM, step.sounds = heard
        if prefix is not None or (seen is not None and self.vision.part.prefix):
            self.see_prefix(step, step.lengths if prefix is None else prefix)
        return self.run(tokens_BT, step, last)

    def heard(self, audio: Tensor | Sounds, kernel: Kernel) -> Heard:
        """Returns the vectors of sounds, each filled up if the model does so."""
        assert self.hearing is not None
        heard = self.hearing.heard(audio, kernel)
        if not self.hearing.part.filled:
            return heard
        last_1M = next(own.last(mapped) for own, mapped in self.own() if own.part.through == "hearing")
        return self.hearing.filled(heard, last_1M)

    def own(self) -> list[tuple[OwnTokens, Mapped]]:
        """Returns the tokens with rows of their own, each with what maps them."""
        found = []
        for own in self.own_tokens if self.spec.own_tokens else ():
            assert isinstance(own, OwnTokens)
            projector = self.get_submodule(f"{own.part.through}.projector")
            assert isinstance(projector, MLPProjector)
            found.append((own, projector.mapped))
        return found

    def see_prefix(self, step: Step, prefix: tuple[int, ...]) -> None:
        """Lets the first `prefix` tokens of each row attend to each other; raises InputError where they may not."""
        fits = len(prefix) == step.batch and all(0 <= n <= m for n, m in zip(prefix, step.lengths, strict=True))
        if not fits or any(step.past):
            raise InputError(
                "not of a text's first tokens",
                field="prefix",
                value=prefix,
                allowed=f"one number of tokens per row, up to {step.lengths}, in the first pass",
            )
        ends_B1 = torch.tensor(prefix, device=step.device)[:, None] - 1
        step.ends_BT, step.ends_past_windows = torch.maximum(step.positions_BT, ends_B1), True

    def looked_up(self, tokens_BT: Tensor, step: Step) -> Tensor:
        """Returns (B, T, M): the token embedding, with placeholders replaced by images."""
        known_BT = self.vision.without_placeholders(tokens_BT, self.spec.n_rows)
        if self.hearing is not None:
            known_BT = self.hearing.without_placeholders(known_BT, self.spec.n_rows)
        x_BTM = self.embedding(known_BT, step)
        for own, mapped in self.own():
            x_BTM = own(x_BTM, tokens_BT, mapped)
        if self.hearing is not None and step.sounds_PM is not None:
            x_BTM = self.hearing.put(x_BTM, tokens_BT, Heard(step.sounds_PM, step.sounds))
        if step.images_NPM is not None:
            step.adjacent = self.placed
            return self.vision.put(x_BTM, tokens_BT, step.images_NPM, step)
        self.vision.carry_on(step)
        return x_BTM

    def after(self, i: int, x_BTM: Tensor, step: Step) -> Tensor:
        """Returns the stream after block i, with the images' vectors that are added there."""
        return self.vision.add(x_BTM, step.added[i], step) if i < len(step.added) else x_BTM

    def known(self, tokens_BT: Tensor) -> Tensor:
        """Returns token 0, padding, for the placeholders of images and sounds."""
        known_BT = tokens_BT.masked_fill(tokens_BT == self.vision.part.placeholder, 0)
        return known_BT if self.hearing is None else known_BT.masked_fill(tokens_BT == self.hearing.part.placeholder, 0)

    def images_by_row(self, tokens_BT: Tensor, step: Step) -> list[Tensor] | None:
        """Returns the images of each row (n, P, M) in this pass, None without images."""
        if step.images_NPM is None:
            return None
        counts = (tokens_BT == self.vision.part.placeholder).sum(1) // self.vision.part.n_tokens
        return [*step.images_NPM.split(counts.tolist())]
