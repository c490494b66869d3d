"""Defaults are one: what --help prints, what a command line without the option uses, and what the library takes."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from typing import Any

import click
import pytest
from click.testing import Result

from asbuilt import plan
from asbuilt.catalog.quantities import parse_bytes
from asbuilt.checkpoint.convert import convert
from asbuilt.cli.main import cli
from asbuilt.generate.sampling import Sampling
from asbuilt.plan.train.options import Options

Run = Callable[..., Result]
RUN = {"temperature": 0.0, "repetition_penalty": 1.0, "seed": 0, "device": "cpu", "dtype": "auto"}
# Once more, by hand: a default that changes is a change of every answer that somebody has written down.
WRITTEN = {
    "web": {"port": 8765},
    "describe": {"batch": 1, "images": 0, "sounds": 0, "dtype": "bf16"},
    "plan serve": {
        "engine": "ideal",
        "bandwidth_efficiency": 1.0,
        "compute_efficiency": 1.0,
        "node": 8,
        "network": "50GB/s",
        "host": "25GB/s",
        "memory": "process",
        "embedding": "lookup",
        "flops": "declared",
        "scores": "causal",
        "count": "floor",
        "targets": "expected",
    },
    "plan train": {
        "gpus": 1,
        "batch": 1,
        "accumulate": 1,
        "optimizer": "adamw",
        "dtype": "bf16",
        "master": True,
        "zero": 0,
        "tp": 1,
        "pp": 1,
        "ep": 1,
        "cp": 1,
        "sequence_parallel": True,
        "divide_vocabulary": True,
        "checkpointing": "none",
        "chunked_loss": 1,
        "loss": "pytorch",
        "offload": "none",
        "effective_time": 0.9,
        "pad_vocabulary": 1,
        "reserve": 0.05,
        "node": 8,
        "network": "50GB/s",
        "host": "25GB/s",
    },
    "generate": RUN | {"max_new_tokens": 256},
    "chat": RUN,
    "convert": {},
    "quantize": {"tokens": 8192},
    "diff": {"text": "An as-built drawing records what was really built.", "tolerance": 1e-4},
    "measure": {"dtype": "auto", "tokens": 8192},
    "embed": {},
    "train": {},
    "tokenizer train": {"pattern": "gpt2", "sentinels": 0, "min_count": 2, "field": "text"},
    "tokenizer compare": {},
    "tokenizer cut": {},
    "models": {},
    "machines": {},
}


def commands(group: click.Group, path: str = "") -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        assert found is not None
        if isinstance(found, click.Group):
            yield from commands(found, f"{path}{name} ")
        else:
            yield path + name, found


ALL = dict(commands(cli))


def given(command: str) -> dict[str, Any]:
    """What each option is without being given, None where it has no default."""
    with click.Context(ALL[command]) as context:
        found = [
            (option, option.get_default(context)) for option in ALL[command].params if isinstance(option, click.Option)
        ]
    return {str(option.name): value if isinstance(value, str | int | float) else None for option, value in found}


def defaults(command: str) -> dict[str, Any]:
    """Those that have one, flags that are off left out."""
    return {name: value for name, value in given(command).items() if value is not None and value is not False}


@pytest.mark.parametrize("command", ALL)
def test_defaults_are_as_written_down(command: str) -> None:
    assert defaults(command) == WRITTEN[command]


@pytest.mark.parametrize("command", ALL)
def test_help_prints_every_default(run: Run, command: str) -> None:
    text = " ".join(run(*command.split(), "--help").stdout.split())
    for option in ALL[command].params:
        value = defaults(command).get(option.name or "")
        if value is not None and not isinstance(value, bool) and option.name != "chunked_loss":
            begun = text.split(f" {', '.join(option.opts)} ", 1)[1]
            assert re.search(rf"\[default: {re.escape(str(value))}[;\]]", begun.split(" --")[0] + begun), option.name


def of_dataclass(kind: Any) -> dict[str, Any]:  # noqa: ANN401
    return {field.name: field.default for field in fields(kind) if field.default is not MISSING}


def of_function(function: Callable[..., Any]) -> dict[str, Any]:
    found = inspect.signature(function).parameters.values()
    return {parameter.name: parameter.default for parameter in found if parameter.default is not parameter.empty}


LIBRARY = {
    "plan serve": of_function(plan.serve) | of_dataclass(plan.Conventions),
    "plan train": of_dataclass(Options),
    "generate": of_dataclass(Sampling),
    "chat": of_dataclass(Sampling),
    "convert": of_function(convert) | {"max_shard_size": of_function(convert)["max_shard_bytes"]},
}


@pytest.mark.parametrize("command", LIBRARY)
def test_the_library_has_the_same(command: str) -> None:
    """An option without a default hands on None, or nothing: then the library's own applies."""
    own = given(command)
    shared = [name for name in own if name in LIBRARY[command]]
    assert len(shared) >= {"plan serve": 20, "plan train": 28, "generate": 6, "chat": 6, "convert": 2}[command]
    for name in shared:
        library = LIBRARY[command][name]
        if isinstance(library, float) and isinstance(own[name], str):
            assert parse_bytes(own[name], name, per_second="/s" in own[name]) == library
        elif own[name] is not None and not (own[name] is False and library is None):
            assert own[name] == library, name


@pytest.mark.parametrize(
    ("words", "keys", "value"),
    [
        (("describe", "llama-3-8b"), ("seq",), 1024),
        (("describe", "gpt2"), ("cache", "dtype"), "bf16"),
        (("plan", "serve", "llama-3.1-8b", "--gpu", "h100-sxm"), ("context",), 8192),
        (("plan", "serve", "gpt2", "--gpu", "h100-sxm"), ("context",), 1024),
        (("plan", "train", "llama-3.1-8b", "--gpu", "h100-sxm"), ("seq",), 4096),
        (("plan", "train", "gpt2", "--gpu", "h100-sxm"), ("seq",), 1024),
    ],
)
def test_defaults_that_help_says_in_words(
    run: Run, words: tuple[str, ...], keys: tuple[str, ...], value: object
) -> None:
    document = json.loads(run(*words, "--json").stdout)
    assert value in found(document, keys[-1])


def found(document: Any, key: str) -> list[Any]:  # noqa: ANN401
    if isinstance(document, dict):
        return [
            *([document[key]] if key in document else []),
            *(x for item in document.values() for x in found(item, key)),
        ]
    return [x for item in document for x in found(item, key)] if isinstance(document, list) else []


def test_help_names_those_in_words(run: Run) -> None:
    text = " ".join(run("describe", "--help").stdout.split())
    assert "1024, or the context length if shorter" in text
    assert "8192, or the model's context if shorter" in " ".join(run("plan", "serve", "--help").stdout.split())
    assert "4096, or the context length if shorter" in " ".join(run("plan", "train", "--help").stdout.split())
