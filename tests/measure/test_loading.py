"""What loading took: the kernel's own peak, in time that a fake clock tells."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import asbuilt
from asbuilt.measure import loading, timing
from asbuilt.measure.loading import Loading, loaded
from asbuilt.nn import build
from asbuilt.nn.model import Model

MIB = 2**20


def model() -> Model:
    """About 32 MiB."""
    return build(asbuilt.decoder(d_model=256, n_layers=8, n_heads=4, n_vocab=4096, max_positions=64))


def test_a_peak_is_seen_though_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of 256 MiB that is gone at the end."""
    ticks = iter([5.0, 7.5, 8.0, 9.0])
    monkeypatch.setattr(timing, "clock", lambda: next(ticks))

    def load() -> Model:
        torch.ones(64 * MIB)
        return model()

    made, found = loaded(load)
    assert found.seconds == 2.5
    assert found.weight_bytes == sum(p.nbytes for p in made.parameters())
    if found.peak_bytes is None:
        pytest.skip("this system has no such counters")
    assert 250 * MIB <= found.peak_bytes < 256 * MIB + 4 * found.weight_bytes
    assert loaded(lambda: made)[1].peak_bytes is not None


def test_what_is_printed() -> None:
    known = Loading(seconds=0.5, weight_bytes=100_000_000, peak_bytes=250_000_000, mapped_bytes=140_000_000)
    assert known.ratio == 1.1
    assert str(known) == (
        "loaded in 0.5 s, with at most 250.00 MB (238.42 MiB) more memory, 140.00 MB (133.51 MiB) of it pages of "
        "mapped files: 1.10 times the weights' 100.00 MB (95.37 MiB)"
    )
    assert known.document()["ratio"] == 1.1
    unknown = Loading(seconds=0.5, weight_bytes=100)
    assert (unknown.ratio, str(unknown)) == (None, "loaded in 0.5 s")


def test_a_system_without_counters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = model()
    monkeypatch.setattr(loading, "RESET", tmp_path / "no" / "such")
    monkeypatch.setattr(loading, "STATUS", tmp_path / "status")
    for text in ("VmHWM: 1 kB\n", "VmHWM: x kB\nVmRSS: 1 kB\nRssFile: 1 kB\n", "VmHWM:\nVmRSS:\nRssFile:\n", None):
        (tmp_path / "status").unlink(missing_ok=True)
        if text is not None:
            (tmp_path / "status").write_text(text)
        assert loaded(lambda: made)[1].peak_bytes is None


@pytest.mark.parametrize(
    ("peak", "held", "then", "known"),
    [(9, 2, 9, False), (9, 2, 10, True), (2, 2, 2, True), (2, 2, 7, True)],
)
def test_a_peak_that_was_before_says_nothing(
    peak: int, held: int, then: int, known: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where the kernel does not begin a new one, in MiB."""
    counters = iter([(peak, held, 1), (then, 2, 2)])
    names = ("VmHWM", "VmRSS", "RssFile")
    monkeypatch.setattr(loading, "RESET", tmp_path / "no" / "such")
    monkeypatch.setattr(loading, "_status", lambda: {n: m * MIB for n, m in zip(names, next(counters), strict=True)})
    made = model()
    found = loaded(lambda: made)[1]
    assert found.peak_bytes == ((then - held) * MIB if known else None)
    assert found.mapped_bytes == (MIB if known else None)
