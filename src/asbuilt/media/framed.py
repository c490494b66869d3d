"""Spectrograms of sounds of any length: a frame for each window that lies within the sound.

Zhang et al. 2023 (USM, arXiv 2303.01037), as Gemma's processors compute them: magnitudes, not powers, in mel bands of
equal height, and natural logarithms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asbuilt.errors import InputError
from asbuilt.families.shared.reader import ConfigReader, is_number

EXTRACTOR, EARLIER = "Gemma4AudioFeatureExtractor", "Gemma3nAudioFeatureExtractor"
MULTIPLE = 128  # samples, to whose next multiple the earlier one pads a sound
MOST_SAMPLES = 480_000  # of a sound, before it is cut: transformers' own, which no file says


# What transformers' two classes do where a file is silent.
USUAL = {
    EXTRACTOR: {
        "frame_length_ms": 20.0,
        "hop_length_ms": 10.0,
        "min_frequency": 0.0,
        "max_frequency": 8000.0,
        "preemphasis": 0.0,
        "mel_floor": 1e-3,
    },
    EARLIER: {
        "frame_length_ms": 32.0,
        "hop_length_ms": 10.0,
        "min_frequency": 125.0,
        "max_frequency": 7600.0,
        "preemphasis": 0.97,
        "mel_floor": 1e-5,
    },
}


@dataclass(frozen=True, kw_only=True)
class FramedLogMel:
    """How a sound becomes a spectrogram: bands, samples a second, of a window, between windows and of a transform.

    Bands lie between the frequencies `low` and `high`. From each sample `emphasis` times the one before it is
    subtracted, a window's first one standing for its own if `first_alone`. `floor` is added to magnitudes before their
    logarithms, or `floored` ones are at least so large; from these `mean` is subtracted, and they are divided by
    `spread`, numbers for each band. Zeros stand before the first sample, half a window; or after the last one, up to a
    `multiple` of so many samples.
    """

    n_mels: int = 128
    rate: int = 16000
    window: int = 320
    hop: int = 160
    n_fft: int = 512
    low: float = 0.0
    high: float = 8000.0
    emphasis: float = 0.0
    first_alone: bool = True
    gain: float = 1.0
    floor: float = 1e-3
    mean: tuple[float, ...] | None = None
    spread: tuple[float, ...] | None = None
    floored: bool = False
    multiple: int | None = None

    @classmethod
    def read(cls, reader: ConfigReader, kind: str = EXTRACTOR) -> FramedLogMel:
        """Returns what a preprocessor's settings say; raises InputError for what is not read."""
        earlier, usual_of = kind == EARLIER, USUAL[kind]
        rate = reader.size("sampling_rate", default=16000, most=1 << 20)
        window, hop = (
            round(rate * reader.number(key, default=usual_of[key], most=1000.0) / 1000)
            for key in ("frame_length_ms", "hop_length_ms")
        )
        for key, samples in (("frame_length_ms", window), ("hop_length_ms", hop)):
            reader.require(key, samples > 0, f"at least one sample of {rate} a second")
        n_fft = 2 ** math.ceil(math.log2(window)) * (2 if reader.flag("fft_overdrive", default=earlier) else 1)
        n_mels = reader.size("feature_size", default=128, most=1024)
        made = cls(
            n_mels=n_mels,
            rate=rate,
            window=window,
            hop=hop,
            n_fft=n_fft,
            low=reader.number("min_frequency", default=usual_of["min_frequency"], above=-1e-9),
            high=reader.number("max_frequency", default=usual_of["max_frequency"]),
            emphasis=reader.number("preemphasis", default=usual_of["preemphasis"], above=-1e-9, most=1.0),
            first_alone=reader.flag("preemphasis_htk_flavor", default=True),
            gain=reader.number("input_scale_factor", default=1.0),
            floor=reader.number("mel_floor", default=usual_of["mel_floor"]),
            mean=_by_band(reader, "per_bin_mean", n_mels),
            spread=_by_band(reader, "per_bin_stddev", n_mels),
            floored=earlier,
            multiple=MULTIPLE if earlier else None,
        )
        reader.require("max_frequency", made.low < made.high, f"above min_frequency = {made.low:g}")
        # transformers computes these anew, whatever a file says: a file that says otherwise was meant otherwise
        for key, computed in (("frame_length", window), ("hop_length", hop), ("fft_length", n_fft)):
            reader.only(key, computed, reason="sampling_rate and the lengths in milliseconds say it")
        reader.only("dither", 0.0, 0, reason="noise would make results random")
        reader.only("padding_value", 0.0, 0, reason="silence is zeros")
        reader.only("padding_side", "right", reason="silence follows the sound")
        for key in ("return_attention_mask", "processor_class", "return_tensors"):
            reader.irrelevant(key, "what transformers returns")
        return made

    @property
    def seconds(self) -> int:
        """Seconds of a sound, the last not whole, longer ones cut."""
        return -(-MOST_SAMPLES // self.rate)

    def n_frames(self, n_samples: int) -> int:
        """Returns the frames of a sound: windows, with one sample more, from half a window before the first sample.

        Sounds that are padded to a `multiple` begin at the first sample.
        """
        before, after = self._padding(min(n_samples, MOST_SAMPLES))
        return max(0, (before + min(n_samples, MOST_SAMPLES) + after - self.window - 1) // self.hop + 1)

    def _padding(self, n_samples: int) -> tuple[int, int]:
        """Returns the zeros before and after a sound of so many samples."""
        if self.multiple is None:
            return self.window // 2, 0
        return 0, -n_samples % self.multiple

    def of(self, samples: Tensor) -> Tensor:
        """Returns the log-mel spectrogram (1, n_mels, n_frames) of mono samples (n) between -1 and 1, in float32.

        Raises InputError for a sound of less than one window.
        """
        count = self.n_frames(len(samples))
        if count == 0:
            allowed = f"more than {self.window - self._padding(0)[0]} samples"
            raise InputError("shorter than a window", field="audio", value=len(samples), allowed=allowed)
        heard = samples[:MOST_SAMPLES].to(torch.float32) * self.gain
        padded = torch.nn.functional.pad(heard, self._padding(len(heard)))
        frames = self._emphasised(padded.unfold(0, self.window + 1, self.hop)[:count])
        magnitudes = self._magnitudes(frames * self._window())
        bands = magnitudes @ self.filters()
        log = (bands.clamp(min=self.floor) if self.floored else bands + self.floor).log()
        if self.mean is not None:
            log = log - torch.tensor(self.mean, dtype=torch.float64)
        if self.spread is not None:
            log = log / torch.tensor(self.spread, dtype=torch.float64)
        return log.to(torch.float32).T[None].contiguous()

    def _window(self) -> Tensor:
        """Returns the factors of a window's samples, in float32; of `floored` magnitudes they are computed in it."""
        if not self.floored:
            return torch.hann_window(self.window, dtype=torch.float64).to(torch.float32)
        turns = 2 * np.pi * np.arange(self.window, dtype=np.float32) / self.window
        return torch.from_numpy((0.5 * (1 - np.cos(turns))).astype(np.float32))

    def _magnitudes(self, windowed: Tensor) -> Tensor:
        """Returns those of each frame's frequencies, in float64.

        Where they are `floored` they are transformed in float32, as NumPy does it: its rounding errors are what is left
        of faint frequencies, and logarithms show them.
        """
        if not self.floored:
            return torch.fft.rfft(windowed.to(torch.float64), n=self.n_fft).abs()
        return torch.from_numpy(np.abs(np.fft.rfft(windowed.numpy(), n=self.n_fft, axis=-1))).to(torch.float64)

    def _emphasised(self, frames: Tensor) -> Tensor:
        """Returns each window's samples, of one sample more, less a share of the one before."""
        if self.emphasis <= 0.0:
            return frames[:, :-1]
        if not self.first_alone:
            return frames[:, 1:] - self.emphasis * frames[:, :-1]
        first = frames[:, :1] * (1.0 - self.emphasis)
        return torch.cat((first, frames[:, 1:-1] - self.emphasis * frames[:, :-2]), 1)

    def filters(self) -> Tensor:
        """Returns the weights (n_fft / 2 + 1, n_mels): triangles between neighbouring mels, each of height 1."""
        mels = torch.linspace(_mels(self.low), _mels(self.high), self.n_mels + 2, dtype=torch.float64)
        edges = 700 * (10 ** (mels / 2595) - 1)
        bins = torch.linspace(0, self.rate // 2, self.n_fft // 2 + 1, dtype=torch.float64)[:, None]
        low, middle, high = edges[:-2], edges[1:-1], edges[2:]
        return torch.minimum((bins - low) / (middle - low), (high - bins) / (high - middle)).clamp(min=0)


def _mels(hertz: float) -> float:
    """Returns a frequency in mels, as HTK counts them."""
    return 2595 * math.log10(1 + hertz / 700)


def _by_band(reader: ConfigReader, key: str, n_mels: int) -> tuple[float, ...] | None:
    """Returns a number for each band, or None."""
    if not reader.given(key):
        return None
    found = reader.config[key]
    while isinstance(found, list) and len(found) == 1 and isinstance(found[0], list):  # as transformers writes them
        found = found[0]
    fits = isinstance(found, list) and len(found) == n_mels and all(is_number(x) for x in found)
    reader.require(key, fits, f"{n_mels} numbers, or null")
    if key.endswith("stddev"):
        reader.require(key, all(x > 0 for x in found), "numbers above 0")
    return tuple(map(float, found))
