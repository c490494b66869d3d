"""`asbuilt models`: the catalogue as it is listed is the catalogue as it is described."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random

from click.testing import Result

from asbuilt import catalog

Run = Callable[..., Result]


def test_every_row_is_listed_once(run: Run) -> None:
    document = json.loads(run("models", "--json").stdout)
    assert [row["name"] for row in document["models"]] == catalog.names()
    assert all(row["source"] for row in document["models"])


def test_a_row_says_what_describe_says(run: Run) -> None:
    rows = json.loads(run("models", "--json").stdout)["models"]
    row = Random().choice(rows)
    bill = json.loads(run("describe", row["name"], "--json").stdout)
    assert row["family"] == bill["family"]
    assert row["parameters"] == bill["parameters"]["total"]
    assert row["cache_bytes_per_token"] == bill["cache"]["bytes_per_token"]
    assert row["context"] == bill["context"]


def test_the_table_has_a_line_per_model(run: Run) -> None:
    text = run("models").stdout
    for name in catalog.names():
        (line,) = [line for line in text.splitlines() if line.split()[:1] == [name]]
        assert f"{catalog.find(name).spec().max_positions:,}" in line


def test_rows_as_published(run: Run) -> None:
    """Llama 3 8B: 8 KV heads of 128 in 32 layers, two bytes; DeepSeek-V3: latents of 512 + 64 in 61."""
    document = json.loads(run("models", "--json").stdout)
    rows = {row["name"]: row for row in document["models"]}
    assert document["cache_dtype"] == "bf16"
    assert rows["llama-3-8b"] | {"source": ""} == {
        "name": "llama-3-8b",
        "family": "llama",
        "parameters": 8_030_261_248,
        "dtype": "bfloat16",
        "source": "",
        "cache_bytes_per_token": 2 * 8 * 128 * 32 * 2,
        "context": 8192,
    }
    assert "arXiv 2407.21783" in rows["llama-3-8b"]["source"]
    latent = rows["deepseek-v3"]
    assert (latent["parameters"], latent["cache_bytes_per_token"]) == (671_026_404_352, (512 + 64) * 61 * 2)


def test_the_table_says_what_its_columns_are(run: Run) -> None:
    _, title, header, *rows = run("models").stdout.splitlines()
    assert title == "Catalogue"
    assert " ".join(header.split()) == "name family parameters cache bytes per token, bf16 context source"
    (line,) = [line for line in rows if line.split()[0] == "llama-3-8b"]
    assert line.split()[:5] == ["llama-3-8b", "llama", "8,030,261,248", "131,072", "8,192"]
