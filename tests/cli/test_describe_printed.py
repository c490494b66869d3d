"""What `describe` prints of a document whose every figure is another, so that none can stand in another's place."""

from __future__ import annotations

from typing import Any

import pytest

from asbuilt.cli.describe import _print

STEPS: list[dict[str, Any]] = [
    {"path": "a.q", "step": "queries", "input": [8], "by": [8, 12], "output": [12], "flops": 192},
    {"path": "a", "step": "RMSNorm", "input": [8], "by": None, "output": [8], "flops": 0},
]
ROWS: list[dict[str, Any]] = [
    {
        "path": "embedding",
        "part": "TokenEmbedding",
        "count": 1,
        "parameters": 88,
        "flops_per_token": 0,
        "cache_bytes_per_token": 0,
    },
    {
        "path": "blocks.*.a",
        "part": "Attention",
        "count": 2,
        "parameters": 301,
        "flops_per_token": 602,
        "cache_bytes_per_token": 24,
    },
]
FULL: dict[str, Any] = {
    "name": "toy",
    "family": "llama",
    "context": 4096,
    "seq": 1500,
    "batch": 3,
    "dtype": "q4_k_m",
    "defaults": {"head_dim": 64, "tie_word_embeddings": False},
    "parameters": {"total": 2000, "active": 1000, "embedding": 88, "attention": 602, "ssm": 0, "ffn": 1310},
    "active_parameters": {"with_tables": 1000, "without_tables": 912},
    "parameters_stored": 2041,
    "stored_extra": {"buffers": 41, "scales": 0},
    "stored_bytes": 4082,
    "packed": {"format": "awq", "weight_bytes": 1100, "problem": None},
    "weight_bytes": {
        "fp32": 8000,
        "bf16": 4000,
        "fp8": 2001,
        "int8": 2002,
        "int4": 1003,
        "q8_0": 2125,
        "q6_k": 1640,
        "q5_k": 1375,
        "q4_k": 1125,
        "q4_0": 1126,
        "q2_k": 700,
        "q4_k_m": 1222,
    },
    "flops": {
        "seq": 1501,
        "products_per_token": 5001,
        "scores_per_token": 5002,
        "scores_per_token_causal": 5003,
        "forward_per_token": 5004,
        "forward_per_token_causal": 5005,
        "training_per_token": 15012,
    },
    "cache": {
        "dtype": "fp8",
        "bytes_per_token": 48,
        "bytes_per_token_expanded": 480,
        "bytes_per_source_token": 49,
        "bytes_per_token_unbounded": 24,
        "window_bytes": 96,
        "fixed_bytes": 0,
        "bytes_at_seq": 36000,
        "bytes_at_seq_batch": 108_000,
    },
    "logits_bytes": 6001,
    "activations": {
        "dtype": "bf16",
        "saved_bytes": 7001,
        "checkpointed_bytes": 7002,
        "largest_block_bytes": 7003,
        "loss_bytes": 7004,
    },
    "decode": {
        "weight_bytes": {"attention": 1204, "ffn": 2620},
        "lookup_bytes": 16,
        "cache_bytes": 36_001,
        "total_bytes": 39_841,
    },
    "rows": ROWS,
    "shapes": [
        {"path": "encoder.blocks", "blocks": [0], "seq": 1500, "steps": STEPS[:1]},
        {"path": "blocks", "blocks": [0, 1, 3], "seq": 1502, "steps": STEPS},
    ],
    "conventions": {"units": "1 GB = 10^9 bytes"},
}
ALL = """\
toy (llama): 2,000 parameters, context 4,096 tokens
Not in config.json, taken from the class's defaults: head_dim 64, tie_word_embeddings false

Parameters
  kind                              number   share
  embedding                             88    4.4%
  attention                            602   30.1%
  ffn                                1,310   65.5%
  total                              2,000  100.0%
  active per token                   1,000   50.0%
  active, without input embeddings     912   45.6%
  also stored: buffers                  41
  as stored in the file              2,041

Weights
  dtype                  bytes  size
  fp32                   8,000  8.00 kB (7.81 KiB)
  bf16                   4,000  4.00 kB (3.91 KiB)
  fp8                    2,001  2.00 kB (1.95 KiB)
  int8                   2,002  2.00 kB (1.96 KiB)
  int4                   1,003  1.00 kB (0.98 KiB)
  q8_0                   2,125  2.12 kB (2.08 KiB)
  q6_k                   1,640  1.64 kB (1.60 KiB)
  q5_k                   1,375  1.38 kB (1.34 KiB)
  q4_k                   1,125  1.12 kB (1.10 KiB)
  q4_0                   1,126  1.13 kB (1.10 KiB)
  q4_k_m                 1,222  1.22 kB (1.19 KiB)
  as stored in the file  4,082  4.08 kB (3.99 KiB)
  as published: awq      1,100  1.10 kB (1.07 KiB)

FLOPs per token, averaged over 1,501
                                    FLOPs
  weight products                   5,001
  attention, full scores            5,002
  attention, masked pairs skipped   5,003
  forward, full scores              5,004
  forward, masked pairs skipped     5,005
  training, full scores            15,012

Cache, fp8
                                               bytes  size
  per token                                       48  48 bytes
  per token, if keys and values were cached      480  480 bytes
  per encoder token                               49  49 bytes
  per token, once windows are full                24  24 bytes
  full windows                                    96  96 bytes
  one sequence of 1,500 tokens                36,000  36.00 kB (35.16 KiB)
  3 sequences                                108,000  108.00 kB (105.47 KiB)

Bytes moved by one decode step at 1,500 tokens, weights q4_k_m, cache fp8
                       bytes  size
  weights: attention   1,204  1.20 kB (1.18 KiB)
  weights: ffn         2,620  2.62 kB (2.56 KiB)
  embedding rows          16  16 bytes
  cache               36,001  36.00 kB (35.16 KiB)
  total               39,841  39.84 kB (38.91 KiB)

Activations of 3 x 1,500 tokens, bf16
                                                bytes  size
  saved for backward, no checkpointing          7,001  7.00 kB (6.84 KiB)
  saved for backward, every block checkpointed  7,002  7.00 kB (6.84 KiB)
  of the largest block, while it is recomputed  7,003  7.00 kB (6.84 KiB)
  saved for backward by the loss                7,004  7.00 kB (6.84 KiB)
  logits                                        6,001  6.00 kB (5.86 KiB)

By part; figures are for one of `count` equal parts
  path        part            count  parameters  FLOPs per token  cache bytes per token
  embedding   TokenEmbedding      1          88                0                      0
  blocks.*.a  Attention           2         301              602                     24

One token's vector through encoder block 0, 1,500 tokens in context
  path  step     input  by      output  FLOPs
  a.q   queries      8  8 x 12      12    192

One token's vector through block 0-1, 3, 1,502 tokens in context
  path  step     input  by      output  FLOPs
  a.q   queries      8  8 x 12      12    192
  a     RMSNorm      8               8      0

Conventions
  term   meaning
  units  1 GB = 10^9 bytes
"""


def test_all_that_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    _print(FULL)
    assert capsys.readouterr().out == ALL


# What is not there is not spoken of: another number of active or stored parameters, a file, packing, parts of a cache.
BARE: dict[str, Any] = FULL | {
    "family": "",
    "defaults": {},
    "batch": 1,
    "dtype": "bf16",
    "stored_extra": {"buffers": 0},
    "stored_bytes": None,
    "parameters": FULL["parameters"] | {"active": 2000},
    "parameters_stored": 2000,
    "packed": None,
    "active_parameters": {"with_tables": 2000, "without_tables": 912},
    "cache": FULL["cache"] | {"bytes_per_token_expanded": 48, "bytes_per_source_token": 0, "window_bytes": 0},
}
LEFT_OUT = (
    "Not in config.json",
    "active per token",
    "without input embeddings",
    "also stored",
    "as stored in the file",
    "q4_k_m",
    "as published",
    "the packing",
    "if keys and values were cached",
    "encoder token",
    "windows",
    " sequences",
    "No cache",
)


def test_what_is_not_there_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    _print(BARE)
    text = capsys.readouterr().out
    assert text.startswith("toy (no published family): 2,000 parameters, context 4,096 tokens\n\nParameters\n")
    assert [words for words in LEFT_OUT if words in text] == []
    assert [line.split()[0] for line in text.split("Weights\n")[1].split("\n\n")[0].splitlines()[1:]] == [
        "fp32",
        "bf16",
        "fp8",
        "int8",
        "int4",
        "q8_0",
        "q6_k",
        "q5_k",
        "q4_k",
        "q4_0",
    ]
    assert "  one sequence of 1,500 tokens  36,000  36.00 kB (35.16 KiB)\n\nBytes moved by one decode step" in text


def test_the_same_number_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    _print(FULL | {"active_parameters": {"with_tables": 1000, "without_tables": 1000}})
    text = capsys.readouterr().out
    assert "active per token" in text
    assert "without input embeddings" not in text


def test_two_sequences_are_more_than_one(capsys: pytest.CaptureFixture[str]) -> None:
    _print(FULL | {"batch": 2})
    assert "  2 sequences                                108,000  108.00 kB" in capsys.readouterr().out


def test_packing_that_is_not_planned(capsys: pytest.CaptureFixture[str]) -> None:
    _print(FULL | {"packed": {"format": None, "weight_bytes": None, "problem": "weights: unheard of"}})
    text = capsys.readouterr().out
    assert "KiB)\n\nPlans do not support the packing of these weights: weights: unheard of\n\nFLOPs" in text
    assert "as published" not in text


def test_what_does_not_decode(capsys: pytest.CaptureFixture[str]) -> None:
    _print(FULL | {"decode": None})
    text = capsys.readouterr().out
    said = "No cache and no decode step: attention is bidirectional."
    assert f"training, full scores            15,012\n\n{said}\n\nActivations of 3 x 1,500" in text
    assert "Cache, fp8" not in text
    assert "Bytes moved" not in text
