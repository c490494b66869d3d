"""Sound: audio files, and the log-mel spectrograms that speech models read.

Radford et al. 2022 (Whisper, arXiv 2212.04356), section 2.2; the mel scale of Slaney's Auditory Toolbox (1998).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asbuilt.errors import InputError
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.files import read_object
from asbuilt.media import framed
from asbuilt.media.framed import FramedLogMel

PREPROCESSOR, PROCESSOR = "preprocessor_config.json", "processor_config.json"
KIND, WITHIN = "feature_extractor_type", "feature_extractor"
EXTRACTOR = "WhisperFeatureExtractor"
LARGEST = 1 << 24  # bytes of a preprocessor_config.json: older ones hold the filters, 80 x 201 numbers
FLOOR, RANGE = 1e-10, 8.0  # the smallest power; the dynamic range, in powers of ten below the largest
HIGHEST = 8000.0  # Hz, the upper edge of the last mel band
LINEAR, STEPS = 1000.0, 27.0  # Hz up to which mels are linear; mels per factor of 6.4 above that
MOST_FRAMES = 1 << 20  # of one sound, before anything is allocated


@dataclass(frozen=True, kw_only=True)
class LogMel:
    """How a sound becomes a spectrogram: bands, samples of a window and between windows, samples a second, seconds."""

    n_mels: int = 80
    n_fft: int = 400
    hop: int = 160
    rate: int = 16000
    seconds: int = 30

    @classmethod
    def read(cls, folder: Path) -> LogMel:
        """Returns what a checkpoint folder's preprocessor_config.json says; raises InputError for what is not read."""
        file = folder / PREPROCESSOR
        reader = ConfigReader(read_object(file, LARGEST, finite=False), str(file))
        reader.only("feature_extractor_type", EXTRACTOR, reason="only this kind of spectrogram is computed")
        made = cls(
            n_mels=reader.size("feature_size", default=80, most=1024),
            n_fft=reader.size("n_fft", default=400, most=1 << 16),
            hop=reader.size("hop_length", default=160, most=1 << 16),
            rate=reader.size("sampling_rate", default=16000, most=1 << 20),
            seconds=reader.size("chunk_length", default=30, most=3600),
        )
        reader.require(
            "hop_length", made.n_frames <= MOST_FRAMES, f"such that a sound has at most {MOST_FRAMES} frames"
        )
        reader.only("n_samples", made.n_samples, reason="sampling_rate and chunk_length say it")
        reader.only("nb_max_frames", made.n_frames, reason="sampling_rate, chunk_length and hop_length say it")
        reader.only("padding_value", 0.0, 0, reason="short sounds are padded with silence")
        reader.only("padding_side", "right", reason="silence follows the sound")
        reader.only("dither", 0.0, 0, reason="noise would make results random")
        reader.only("do_normalize", False, None, reason="samples are not normalised")
        reader.irrelevant("mel_filters", "computed from the other keys")
        for key in ("return_attention_mask", "processor_class", "return_tensors"):
            reader.irrelevant(key, "what transformers returns")
        reader.finish()
        return made

    @property
    def n_samples(self) -> int:
        """Samples of a sound, shorter ones padded with silence and longer ones cut."""
        return self.seconds * self.rate

    @property
    def n_frames(self) -> int:
        """Frames of a sound."""
        return self.n_samples // self.hop

    def of(self, samples: Tensor) -> Tensor:
        """Returns the log-mel spectrogram (1, n_mels, n_frames) of mono samples (n) between -1 and 1, in float32."""
        heard = samples[: self.n_samples].to(torch.float32)
        padded = torch.nn.functional.pad(heard, (0, self.n_samples - len(heard)))
        window = torch.hann_window(self.n_fft)
        spectrum = torch.stft(padded, self.n_fft, self.hop, window=window, return_complex=True)
        power = spectrum[:, : self.n_frames].abs().square()
        log = (self.filters() @ power).clamp(min=FLOOR).log10()
        return ((torch.maximum(log, log.max() - RANGE) + 4) / 4)[None]

    def filters(self) -> Tensor:
        """Returns the weights (n_mels, n_fft / 2 + 1): triangles between neighbouring mels, each of area 1."""
        top = _mels(HIGHEST)
        edges = torch.tensor([_hertz(top * i / (self.n_mels + 1)) for i in range(self.n_mels + 2)], dtype=torch.float64)
        bins = torch.linspace(0, self.rate // 2, self.n_fft // 2 + 1, dtype=torch.float64)
        low, middle, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
        triangles = torch.minimum((bins - low) / (middle - low), (high - bins) / (high - middle)).clamp(min=0)
        return (triangles * 2 / (high - low)).to(torch.float32)


def spectrogram_of(folder: Path) -> LogMel | FramedLogMel:
    """Returns how a checkpoint folder's model is given sounds; raises InputError for settings that are not read.

    They stand in its preprocessor_config.json, or in processor_config.json among those of other inputs.
    """
    file, field = folder / PROCESSOR, WITHIN
    within = read_object(file, LARGEST, finite=False) if file.is_file() else {}
    if not isinstance(within.get(WITHIN), dict):
        file, field = folder / PREPROCESSOR, ""
        found = read_object(file, LARGEST, finite=False)
    else:
        found = within[WITHIN]
    if found.get(KIND) == EXTRACTOR and not field:
        return LogMel.read(folder)
    reader = ConfigReader(found, str(file), f"{field}." if field else "")
    kinds = (framed.EXTRACTOR, framed.EARLIER)
    reader.only(KIND, *kinds, reason="only these kinds of spectrogram, and Whisper's, are computed")
    if KIND not in found:
        raise reader.error(KIND, "missing", allowed=f"{EXTRACTOR}, {framed.EXTRACTOR} or {framed.EARLIER}")
    made = FramedLogMel.read(reader, found[KIND])
    reader.finish()
    return made


def _mels(hertz: float) -> float:
    """Returns a frequency in mels: linear up to 1000 Hz, which are 15, and logarithmic above."""
    if hertz < LINEAR:
        return 3 * hertz / 200
    return 15 + STEPS * math.log(hertz / LINEAR) / math.log(6.4)


def _hertz(mels: float) -> float:
    return 200 * mels / 3 if mels < 15 else LINEAR * math.exp((mels - 15) * math.log(6.4) / STEPS)


def read_sound(path: str | Path, *, rate: int, seconds: int) -> Tensor:
    """Returns the mono samples (n) of at most so many seconds of an audio file; several channels are averaged.

    Raises InputError for a file that cannot be read, and for another sampling rate.
    """
    try:
        import soundfile
    except ImportError as error:
        raise InputError("is not installed", field="soundfile", fix="pip install 'asbuilt[media]'") from error
    try:
        with soundfile.SoundFile(str(path)) as file:
            if file.samplerate != rate:
                fix = f"convert it: ffmpeg -i {Path(path).name} -ar {rate} -ac 1 out.wav"
                allowed = f"{rate} samples a second"
                raise InputError("the sampling rate", field=str(path), value=file.samplerate, allowed=allowed, fix=fix)
            samples: Any = file.read(min(len(file), seconds * rate), dtype="float32", always_2d=True)
    except (soundfile.LibsndfileError, OSError) as error:
        raise InputError(f"cannot be read as sound: {error}", field=str(path)) from error
    if not len(samples):
        raise InputError("has no samples", field=str(path))
    return torch.from_numpy(samples).mean(1)
