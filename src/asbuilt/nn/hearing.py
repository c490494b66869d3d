"""Sounds in a text. Shapes: sounds N, tokens of a sound P, batch B, text tokens T, width M."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from asbuilt.nn.placed import Placed
from asbuilt.nn.registry import computes, module
from asbuilt.spec import hearing as spec
from asbuilt.spec.part import Kernel

if TYPE_CHECKING:
    from asbuilt.nn.audio_encoder import AudioEncoder


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

    def put(self, x_BTM: Tensor, tokens_BT: Tensor, made_NPM: Tensor) -> Tensor:
        """Returns the embedded text with placeholders replaced by the sounds' vectors, in order.

        Raises InputError unless each text has as many placeholders as its sounds need.
        """
        places = self.places(tokens_BT, len(made_NPM))
        return x_BTM.masked_scatter(places[..., None], made_NPM.to(x_BTM.dtype))
