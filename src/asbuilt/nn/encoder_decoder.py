"""Encoder-decoders: one stack reads a source, another generates text with cross-attention to it.

Shapes: batch B, new tokens T, source tokens S; of a sound mel bands F and frames N.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from asbuilt.nn.audio_encoder import AudioEncoder
from asbuilt.nn.model import Model, source_mask
from asbuilt.nn.registry import computes
from asbuilt.nn.step import Step
from asbuilt.nn.text_encoder import TextEncoder
from asbuilt.spec import encoder_decoder as spec
from asbuilt.spec.part import Kernel

if TYPE_CHECKING:
    from asbuilt.nn.cache import Cache


@computes(spec.EncoderDecoder)
class EncoderDecoder(Model):
    """Tokens to logits, with cross-attention to a source."""

    encoder: TextEncoder | AudioEncoder

    def forward(
        self,
        tokens_BT: Tensor,
        *,
        cache: Cache | None = None,
        valid_BT: Tensor | None = None,
        source_BS: Tensor | None = None,
        source_valid_BS: Tensor | None = None,
        audio: Tensor | None = None,
        reach: tuple[int, ...] | None = None,
        last: bool = False,
        kernel: Kernel = "fused",
        **unread: Any,  # noqa: ANN401  # what no forward reads
    ) -> Tensor:
        """Returns logits (B, T, n_vocab), or (B, 1, n_vocab) of each row's last valid token if `last`.

        The encoder reads `source_BS`, or log-mel spectrograms `audio` (B, F, N), given with a sequence's first tokens;
        `source_valid_BS` marks a source's valid tokens.
        """
        text = {"source_BS": source_BS, "source_valid_BS": source_valid_BS}
        self.refuse(unread | ({"audio": audio} if isinstance(self.encoder, TextEncoder) else text))
        step = self.begin((tokens_BT.shape[0], tokens_BT.shape[1]), tokens_BT.device, cache, valid_BT, kernel, reach)
        if isinstance(self.encoder, TextEncoder):
            self.read(source_BS, source_valid_BS, step)
        else:
            self.hear(self.encoder, audio, step)
        return self.run(tokens_BT, step, last)

    def read(self, source_BS: Tensor | None, valid_BS: Tensor | None, step: Step) -> None:
        """Sets the step's encoder output; in later passes with a cache, only the mask of valid tokens."""
        assert isinstance(self.encoder, TextEncoder)
        if source_BS is not None:
            shape = (source_BS.shape[0], source_BS.shape[1])
            inner = self.encoder.begin(shape, source_BS.device, None, valid_BS, step.kernel)
            inner.table = self.table
            step.source_BSM = self.encoder.logits(source_BS, inner, last=False)
            if step.cache is not None:
                step.cache.begin_source(source_BS.shape[1], valid_BS)
        elif step.cache is not None:
            valid_BS = step.cache.source_valid_BS
        step.source_mask = source_mask(valid_BS)

    def hear(self, encoder: AudioEncoder, audio: Tensor | None, step: Step) -> None:
        """Sets the step's encoder output of spectrograms; later passes with a cache have none."""
        if audio is None:
            return
        inner = encoder.opened(audio, step.kernel)
        step.source_BSM = encoder.logits(audio, inner, last=False)
        if step.cache is not None:
            step.cache.source_tokens = inner.tokens
