"""Sounds in a text. Shapes: sounds N, tokens of a sound P, batch B, text tokens T, width M."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from asbuilt.errors import InputError
from asbuilt.nn.audio import Sounds
from asbuilt.nn.placed import Placed
from asbuilt.nn.registry import computes, module
from asbuilt.spec import hearing as spec
from asbuilt.spec.part import Kernel

if TYPE_CHECKING:
    from asbuilt.nn.audio_encoder import AudioEncoder


class Heard(NamedTuple):
    """What a text hears: vectors in place of tokens, (N, P, M) or of sounds of any length (all, M), and each one's."""

    made: Tensor
    tokens: tuple[int, ...]


@computes(spec.Hearing)
class Hearing(Placed):
    """Spectrograms to vectors that replace placeholders."""

    what: ClassVar[str] = "sound"
    part: spec.Hearing
    tower: AudioEncoder

    def __init__(self, part: spec.Hearing, path: str) -> None:
        super().__init__()
        self.part = part
        self.add_module("tower", module(part.tower, f"{path}.tower"))
        self.projector = module(part.projector, f"{path}.projector")

    def forward(self, audio_NFL: Tensor, kernel: Kernel) -> Tensor:
        """Returns (N, P, M) for spectrograms (N, bands, frames); raises InputError for another size."""
        return self.projector(self.tower(audio_NFL, kernel=kernel))

    def heard(self, audio: Tensor | Sounds, kernel: Kernel) -> Heard:
        """Returns the vectors of all sounds, in order, those of one size computed together.

        Raises InputError for spectrograms of another size.
        """
        if isinstance(audio, Tensor):
            made_NPM = self(audio, kernel)
            return Heard(made_NPM, (made_NPM.shape[1],) * len(made_NPM))
        found: dict[int, Tensor] = {}
        for which, mels_NFL in audio.alike():
            found |= dict(zip(which, self(mels_NFL, kernel), strict=True))
        if not found:
            raise InputError("empty", field="audio", allowed="one sound at least")
        each = [found[i] for i in range(len(found))]
        return Heard(torch.cat(each), tuple(map(len, each)))

    def put(self, x_BTM: Tensor, tokens_BT: Tensor, heard: Heard) -> Tensor:
        """Returns the embedded text with placeholders replaced by the sounds' vectors, in order.

        Raises InputError unless each text has as many placeholders as its sounds need.
        """
        places = tokens_BT == self.part.placeholder
        if not tokens_BT.is_meta:
            self.compare(places, heard.tokens)
        return x_BTM.masked_scatter(places[..., None], heard.made.flatten(0, -2).to(x_BTM.dtype))

    def filled(self, heard: Heard, last_1M: Tensor) -> Heard:
        """Returns each sound with as many vectors as the longest has, the rest of them the one given."""
        n = self.part.n_tokens
        each = heard.made.flatten(0, -2).split(heard.tokens)
        full = [torch.cat((made_PM, last_1M.expand(n - len(made_PM), -1))) for made_PM in each]
        return Heard(torch.stack(full), (n,) * len(full))

    def compare(self, places_BT: Tensor, tokens: tuple[int, ...]) -> None:
        """Raises InputError unless the placeholders of each text are those of whole sounds, of so many tokens each."""
        if len(set(tokens)) == 1 and tokens[0] == self.part.n_tokens:
            self.check(places_BT, len(tokens))
            return
        left, counts = [*tokens], places_BT.sum(1).tolist()
        for count in counts:
            while count > 0 and left:
                count -= left.pop(0)
            if count != 0:
                left = [0]
                break
        if left:
            sizes = ", ".join(map(str, tokens[:8]))
            allowed = f"{sizes} of token {self.part.placeholder}, one number per {self.what}"
            raise InputError(f"wrong number of {self.what} placeholders", field="tokens", value=counts, allowed=allowed)
