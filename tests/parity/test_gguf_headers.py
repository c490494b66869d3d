"""Damaged headers of every architecture: each is read or refused with one message, and nothing else."""

from __future__ import annotations

import math
import random
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from ggml.models import ENCODER_DECODERS, ENCODERS, MODELS
from ggml.written import write

from asbuilt.checkpoint.load import match
from asbuilt.errors import InputError
from asbuilt.families import gguf_table, read_gguf
from asbuilt.formats.gguf import GGUFFile, read_header

DIRECTORY = TemporaryDirectory()
ALL = MODELS | ENCODERS | ENCODER_DECODERS
ODD: tuple[object, ...] = (
    0,
    1,
    2,
    3,
    7,
    8,
    16,
    2**31,
    2**40,
    -1,
    True,
    False,
    "x",
    "yarn",
    "linear",
    "",
    [1],
    [],
    None,
)
ODD += (0.0, -1.0, 1e-30, 1e-5, 0.5, 1.0, 3.5, 1e30, 1e38, math.inf, math.nan)
CASES = 25


@cache
def whole(name: str) -> GGUFFile:
    """Returns the header of a model's file."""
    path = write(ALL[name], Path(DIRECTORY.name) / f"{name}.gguf", np.random.default_rng(1))
    return read_header(path)


def damaged(file: GGUFFile, draw: random.Random) -> GGUFFile:
    """Returns the header with one to three keys changed, dropped or invented, or tensors dropped."""
    metadata, tensors = dict(file.metadata), dict(file.tensors)
    own = [key for key in metadata if not key.startswith(("general.", "tokenizer."))]
    for _ in range(draw.randint(1, 3)):
        key, way = draw.choice(own), draw.random()
        if way < 0.7:
            metadata[key] = draw.choice(ODD)
        elif way < 0.8:
            metadata.pop(key, None)
        elif way < 0.9:
            tensors.pop(draw.choice(list(tensors)), None)
        else:
            other = draw.choice(list(ALL))
            metadata[draw.choice([f"{key.partition('.')[0]}.{k}" for k in ALL[other].keys])] = draw.choice(ODD)
    return replace(file, metadata=metadata, tensors=tensors)


@pytest.mark.parametrize("name", ALL)
def test_every_damaged_header_is_read_or_refused(name: str) -> None:
    seed = random.randrange(2**32)
    draw = random.Random(seed)
    for i in range(CASES):
        file = damaged(whole(name), draw)
        began = time.process_time()
        try:
            reading = read_gguf(file, "x")
            table = gguf_table(reading.family, reading.spec, file.tensors)
            match(table, reading.spec, file.tensors, "x")
        except InputError:
            pass
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error} escaped from case {i} of seed {seed}") from error
        assert time.process_time() - began < 2, f"case {i} of seed {seed}"
