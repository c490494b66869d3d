"""The kernels for ARM, cross-compiled and run by qemu: every format and plain dtype, every tail, within their bound.

That says nothing of speed. With `ARM_OPTIMISE=-O3` the code is proved as it is built, which takes minutes.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from block_scales import drawn
from torch import Tensor

from asbuilt.dtypes import BLOCKS
from asbuilt.kernels import native, packed
from asbuilt.kernels.codebooks import GRIDS

COMPILER, QEMU = "aarch64-linux-gnu-g++", "qemu-aarch64"
HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "native" / "src"
KINDS = {"portable": [], "neon": ["-DNEON"], "neon_dot": ["-DNEON", "-march=armv8.2-a+dotprod"]}


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    missing = [name for name in (COMPILER, QEMU) if shutil.which(name) is None]
    if missing or not (SOURCES / "neon.h").is_file():
        pytest.skip(f"needs {' and '.join(missing) or 'native/'} (Debian: g++-aarch64-linux-gnu, qemu-user)")
    made = tmp_path_factory.mktemp("arm")
    usual = [COMPILER, "-std=gnu++17", os.environ.get("ARM_OPTIMISE", "-O0"), "-Wall", "-Werror", "-Wno-psabi"]

    def compiled(kind: str) -> None:
        named = [f"-DKERNELS={kind}", "-c", str(SOURCES / "kernels.cpp"), "-o", f"{made}/{kind}.o"]
        subprocess.run([*usual, *KINDS[kind], *named], check=True)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compiled, KINDS))
    rest = [SOURCES / "interface.cpp", SOURCES / "pool.cpp", HERE / "arm_driver.cpp", *made.glob("*.o")]
    has = ["-DHAS_neon", "-DHAS_neon_dot", f"-I{SOURCES}", "-static", "-pthread"]
    subprocess.run([*usual, *has, *map(str, rest), "-o", f"{made}/driver"], check=True)
    return made / "driver"


@dataclass(frozen=True, kw_only=True)
class Product:
    format: str
    weight: Tensor  # plain numbers, or the bytes of blocks (rows, bytes of a row)
    x: Tensor
    bias: Tensor

    def request(self) -> bytes:
        rows, sizes = len(self.weight), (self.x.shape[1], self.x.shape[0])
        return asked(self.format, self.weight, rows, *sizes) + raw(self.x) + raw(self.bias)

    def dense(self) -> Tensor:
        if self.weight.dtype != torch.uint8:
            return self.weight.float()
        return packed.expand(self.weight, self.format, torch.float32)


def raw(x: Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes()


def asked(name: str, data: Tensor, rows: int = 0, inputs: int = 0, tokens: int = 0) -> bytes:
    held = raw(data)
    return (
        name.upper().encode().ljust(16, b"\0") + np.array([rows, inputs, tokens, len(held)], np.int64).tobytes() + held
    )


def products() -> list[Product]:
    made = []
    for tokens in (1, 2, 3, 7, 50):
        for format in sorted(packed.EXPANDED):
            rows, inputs = random.randint(1, 30), random.randint(1, 3) * BLOCKS[format][0]
            weight = drawn(format, rows, inputs)
            made.append(Product(format=format, weight=weight, x=torch.randn(tokens, inputs), bias=torch.randn(rows)))
        for dtype, name in native.NUMBERS.items():
            rows, inputs = random.randint(1, 70), random.randint(1, 300)
            weight = torch.randn(rows, inputs).to(dtype)
            made.append(Product(format=name, weight=weight, x=torch.randn(tokens, inputs), bias=torch.randn(rows)))
    return made


def rounded_twice(x: Tensor) -> tuple[Tensor, Tensor]:
    """x as the sum of two int8 with a scale for each 32, and the half step by which it may differ (docs/native.md)."""
    groups = x.view(len(x), -1, 32)
    most = groups.abs().amax(-1, keepdim=True)
    scaled = groups * (torch.full_like(most, 127) / most)
    fine = ((scaled - scaled.round()) * 254).round()
    made = (254 * scaled.round() + fine) * (most / (127 * 254))
    return made.view_as(x), (most / 508 / 127).expand_as(groups).reshape(x.shape)


def check(given: Product, y: Tensor, looked_up: Tensor) -> None:
    dense, x, bias = given.dense().double(), given.x.double(), given.bias.double()
    assert torch.equal(looked_up, given.dense()), given.format
    size = x.abs() @ dense.abs().T + 1
    if given.weight.dtype == torch.uint8 and len(x) < 48:
        whole = len(dense) // native.GROUP * native.GROUP  # the rows that are left are multiplied by x as it is
        near, step = rounded_twice(given.x)
        want = torch.cat((near.double() @ dense[:whole].T, x @ dense[whole:].T), 1) + bias
        assert ((y - want).abs() / size).max() < 1e-6, given.format
        assert ((y - bias - x @ dense.T).abs() <= step.double() @ dense.abs().T * 1.01 + 1e-6 * size).all(), (
            given.format
        )
    else:
        assert ((y - x @ dense.T - bias).abs() / size).max() < 2e-6, given.format


def answers(raw_answers: bytes, given: Sequence[Product]) -> None:
    at = 0
    for one in given:
        rows, (tokens, inputs) = len(one.weight), one.x.shape
        counts = (tokens * rows * 4, rows * inputs * 4, len(raw(one.weight)))
        y, looked_up, back = (raw_answers[at + sum(counts[:i]) : at + sum(counts[: i + 1])] for i in range(3))
        at += sum(counts)
        assert back == raw(one.weight), f"{one.format} is interleaved and back"
        numbers = (torch.frombuffer(bytearray(part), dtype=torch.float32) for part in (y, looked_up))
        check(one, *(x.view(shape) for x, shape in zip(numbers, ((tokens, rows), (rows, inputs)), strict=True)))
    assert at == len(raw_answers)


@pytest.mark.parametrize("kind", ["neon", "neon_dot"])
def test_products_of_arm_are_within_their_bound(driver: Path, kind: str) -> None:
    given, grids = products(), [asked(name, points.points().to(torch.int8)) for name, points in GRIDS.items()]
    requests = b"".join((*grids, *(one.request() for one in given)))
    seed = str(random.randrange(2**31))
    ran = subprocess.run([QEMU, str(driver), kind, seed], input=requests, capture_output=True, check=False)
    assert ran.returncode == 0, f"seed {seed}: {ran.stderr.decode()}"
    answers(ran.stdout, given)


def test_a_processor_without_dot_products_is_not_asked_for_them(driver: Path) -> None:
    ran = subprocess.run([QEMU, "-cpu", "cortex-a72", str(driver), "neon_dot", "1"], capture_output=True, check=False)
    assert ran.stderr.decode() == "usable here: neon portable\n"
