"""What an encoder-decoder needs while it runs."""

from __future__ import annotations

from asbuilt.kernels.memory.model import ModelMemory, peak
from asbuilt.kernels.memory.registry import memory_of
from asbuilt.spec.encoder_decoder import EncoderDecoder
from asbuilt.spec.part import Pass


@memory_of(EncoderDecoder)
class EncoderDecoderMemory(ModelMemory[EncoderDecoder]):
    """Memory of two consecutive stacks."""

    def peak_bytes(self, run: Pass) -> int:
        """The encoder; or the decoder beside the encoder's output, which stays."""
        encoder, source = self.part.encoder, self.part.child_run("encoder", run)
        made = 0 if source is None else source.rows * encoder.d_model * run.width
        return max(peak(encoder, source), made + super().peak_bytes(run))
