"""How a request is run: devices and threads that are here, and packed weights or a dtype by what is faster."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asbuilt import memory
from asbuilt.api import running
from asbuilt.api.running import Running, devices, require_device, speeds_here, use_threads
from asbuilt.errors import InputError
from asbuilt.kernels import native, speed
from asbuilt.kernels.speed import Speed
from asbuilt.measure.rates import TimeGrid

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert use_threads(2) == torch.get_num_threads() == 2
    assert use_threads(None) == 2
    for wrong in (0, 4, -1, True):
        with pytest.raises(InputError, match="--threads: must be from 1 to 3, the processors of this machine, got"):
            use_threads(wrong, "--threads")


@pytest.mark.parametrize(
    ("cards", "apple", "here"),
    [(0, False, ["cpu"]), (1, False, ["cpu", "cuda"]), (2, False, ["cpu", "cuda", "cuda:0", "cuda:1"]),
     (0, True, ["cpu", "mps"])],
)  # fmt: skip
def test_devices(cards: int, apple: bool, here: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cards > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: apple)
    assert devices() == here
    for name in here:
        assert require_device(name) == name
    if cards:
        assert require_device("cuda:0") == "cuda:0"
    for name in ("cuda", "cuda:1", "mps", "tpu"):
        if name not in here:
            with pytest.raises(InputError, match=f"device: not on this machine .got '{name}'; must be cpu"):
                require_device(name)


def test_speeds_are_the_calibrations_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same products that are timed otherwise: 32 rows, and one, times 2,048 x 768."""
    timed = (Speed(9, 9), Speed(8, 8))
    monkeypatch.setattr(speed, "speeds", lambda dtypes: timed)

    def rates(factor: float) -> Any:  # noqa: ANN401
        vector = TimeGrid(axes=((1024, 4096), (512, 2048)), seconds=(factor,) * 4)
        matrix = TimeGrid(axes=((16, 128), (512, 2048), (1024, 4096)), seconds=(32 * 3 * factor,) * 8)
        return SimpleNamespace(vector=vector, matrix=matrix)

    kept = SimpleNamespace(rates={"bf16": rates(2.0), "fp32": rates(1.0)})
    calibrate = import_module("asbuilt.measure.calibrate")  # the package has a function of this name
    monkeypatch.setattr(calibrate, "stored", lambda: kept)
    for found, want in zip(speeds_here((BF16, FP32)), (Speed(6, 2), Speed(3, 1)), strict=True):
        assert (found.prefill, found.decode) == pytest.approx((want.prefill, want.decode))
    assert speeds_here((FP16, FP32)) is timed
    monkeypatch.setattr(calibrate, "stored", lambda: None)
    assert speeds_here((BF16, FP32)) is timed


def packed_file(formats: dict[str, int] | None = None) -> Any:  # noqa: ANN401
    """A file of some Q8_0 and more Q4_1, and of a format that the native kernels lack."""
    formats = {"q8_0": 10, "q4_1": 20, "q8_1": 90} if formats is None else formats
    return SimpleNamespace(formats=formats, source=SimpleNamespace(spec=None, gguf=None, kind="folder", path=None))


Here = Callable[..., None]
REQUEST = running.Request(prompt_tokens=10, new_tokens=10, needs=lambda spec, dtype: 0)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Here:
    """A machine with native kernels of some speed, float32 taking (1, 1), and free memory."""

    def be(packed: Speed, free: int | None = None, lib: object = True, instructions: str = "portable") -> None:
        asked: list[str] = []
        monkeypatch.setattr(native, "library", lambda: lib)
        monkeypatch.setattr(native, "instructions", lambda: instructions)
        monkeypatch.setattr(
            native, "number", lambda kind: ["q4_1", "q8_0", "q4_0"].index(kind) if kind != "q8_1" else -1
        )
        monkeypatch.setattr(speed, "packed_speeds", lambda kind: (asked.append(kind), (packed, Speed(1, 1)))[1])
        monkeypatch.setattr(memory, "free", lambda: free)
        monkeypatch.setattr(running, "built_bytes", lambda spec, dtype: 100)

    return be


def test_weights_stay_packed_unless_that_is_much_slower(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    def stays(how: Running = Running(), tokens: tuple[int, int] = (10, 10)) -> bool:  # noqa: B008
        held = []

        def contents(source: Any, *, packed: bool | None, adapter: object) -> Any:  # noqa: ANN401
            held.append(packed)
            return packed_file()

        monkeypatch.setattr(running, "headers", lambda source: {})
        monkeypatch.setattr(running, "Contents", contents)
        running.contents_of(packed_file().source, how, tokens)
        return held[-1] is None

    here(Speed(1, 0.3))
    assert stays()
    assert stays(Running(dtype=FP32))
    assert not stays(Running(dtype=BF16))
    assert not stays(Running(device="cuda"))
    here(Speed(1.3, 1.2), free=None)  # 25 beside 20: float32 takes exactly 0.8 of the time
    assert stays()
    here(Speed(1.3, 1.3), free=None)
    assert not stays()
    assert stays(tokens=(0, 0))
    here(Speed(1.3, 1.3), free=201)
    assert not stays()
    here(Speed(1.3, 1.3), free=200)  # float32 does not fit beside what is expanded
    assert stays()
    here(Speed(1.3, 1.3), instructions="avx2")  # nothing is timed
    assert stays()
    assert running._packed_choice(packed_file(), Running(), REQUEST) == "computing with packed weights (q4_1)"
    here(Speed(1, 0.3), lib=None)
    assert not stays()


def test_the_format_of_most_bytes_is_timed(here: Here) -> None:
    here(Speed(1, 1))
    assert running._usual(packed_file()) == "q4_1"
    assert running._usual(packed_file({})) == running._usual(packed_file({"q8_1": 9})) == ""


def test_the_choice_is_said_unless_it_was_told(here: Here) -> None:
    request = REQUEST
    here(Speed(0.5, 0.5))
    told = running._packed_choice(packed_file(), Running(), request)
    assert told == "computing with packed weights (q4_1), 2.0 times as fast as float32 on this CPU"
    assert running._packed_choice(packed_file(), Running(packed=True), request) == ""
    assert running._packed_choice(packed_file(), Running(dtype=FP32), request) == ""
    here(Speed(1.1, 1.1))
    told = running._packed_choice(packed_file(), Running(), request)
    assert told == "computing with packed weights (q4_1) to save memory"
