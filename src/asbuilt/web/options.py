"""Which options the page may ask with, and how each is read: texts as the command line takes them.

A question's option has the name of the command line's, with underscores; an on/off option is "yes" or "no". What names
a file there is its text here, since a page reads no paths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from asbuilt.catalog.quantities import parse_bytes, parse_count, parse_size, parse_time, parse_tokens
from asbuilt.errors import InputError, one_of
from asbuilt.plan.serve.conventions import CHOICES, SIZES
from asbuilt.plan.serve.workload import parse_lengths

Parse = Callable[[Any, str], Any]
FLAGS = {"yes": True, "no": False}
LONGEST_WORD = 200


def whole(value: object, field: str) -> int:
    """Returns a whole number, or a text that is one."""
    if isinstance(value, str) and value.strip().isdecimal() and len(value) < 20:
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(field=field, value=value, allowed="a whole number")
    return value


def number(value: object, field: str) -> float:
    """Returns a number, or a text that is one."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(field=field, value=value, allowed="a number") from error


def word(value: object, field: str) -> str:
    """Returns a short text."""
    if not isinstance(value, str) or len(value) > LONGEST_WORD:
        raise InputError(field=field, value=value, allowed="a word")
    return value


def machine_name(value: object, field: str) -> str:
    """Returns a machine's name or numbers; neither files nor measurements are for a page."""
    name = value if isinstance(value, str) else ""
    if not 0 < len(name) <= LONGEST_WORD or ".toml" in name.lower() or name.partition(",")[0] == "this":
        raise InputError(field=field, value=value, allowed="a name from `asbuilt machines`, or numbers")
    return name


def _rate(value: object, field: str) -> float:
    return parse_bytes(word(value, field), field, per_second=True)


def _size(value: object, field: str) -> float:
    return parse_size(word(value, field), field)


def _flag(value: object, field: str) -> bool:
    if not isinstance(value, str) or value not in FLAGS:
        raise InputError(field=field, value=value, allowed=one_of(FLAGS))
    return FLAGS[value]


def _names(value: object, field: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in word(value, field).split(","))


def _lengths(value: object, field: str) -> tuple[tuple[int, int], ...]:
    if not isinstance(value, str):
        raise InputError(field=field, value=value, allowed="the text of a file of lengths")
    return parse_lengths(value, "the file")


DESCRIBE: dict[str, Parse] = {"seq": parse_tokens, "batch": whole, "dtype": word, "kv_dtype": word}
SERVE: dict[str, Parse] = {
    **dict.fromkeys(
        ("gpus", "tp", "pp", "ep", "redundant_experts", "users", "max_num_seqs", "node", "block_size"), whole
    ),
    **dict.fromkeys(("n_gpu_layers", "n_cpu_moe", "lora", "lora_rank", "speculate", "requests", "seed"), whole),
    **dict.fromkeys(("context", "prompt", "chunk", "input_tokens", "output_tokens"), parse_tokens),
    **dict.fromkeys(("dtype", "kv_dtype", "engine", "rate", "arrivals", "price", *CHOICES), word),
    **dict.fromkeys(("prefill_gpus", "decode_gpus", "kv_transfer"), word),
    **dict.fromkeys(("prefix_share", "acceptance", "draft_cost", "utilisation"), number),
    **dict.fromkeys(("bandwidth_efficiency", "compute_efficiency"), number),
    **dict.fromkeys(("latency_target", "first_token_target"), parse_time),
    **dict.fromkeys(("network", "host"), _rate),
    **dict.fromkeys(("page", "any_vendor"), _flag),
    **dict.fromkeys(SIZES, _size),
    "kv_host": parse_bytes,
    "cpu": machine_name,
    "lora_targets": _names,
    "lengths": _lengths,
}
# Options of the command line that Python has under other names, and those that are conventions.
RENAMED = {"n_gpu_layers": "gpu_layers", "n_cpu_moe": "cpu_moe"}
CONVENTIONS = (*CHOICES, *SIZES, "utilisation", "page", "block_size", "node", "network", "host")
TRAIN: dict[str, Parse] = {
    **dict.fromkeys(("gpus", "batch", "accumulate", "zero", "tp", "pp", "ep", "cp", "node"), whole),
    **dict.fromkeys(("hsdp", "interleave", "expert_nodes", "pad_vocabulary", "chunked_loss", "lora"), whole),
    **dict.fromkeys(("optimizer", "dtype", "gradient_dtype", "checkpointing", "schedule", "loss", "offload"), word),
    **dict.fromkeys(("price", "utilisation", "effective_time", "reserve"), number),
    **dict.fromkeys(("kernel_efficiency", "attention_efficiency"), number),
    **dict.fromkeys(("master", "sequence_parallel", "divide_vocabulary", "qlora"), _flag),
    **dict.fromkeys(("fp8", "fp8_dispatch", "overlap_experts", "overlap_tensor", "documents", "gather_context"), _flag),
    **dict.fromkeys(("network", "host"), _rate),
    **dict.fromkeys(("tokens", "tokens_per_step"), parse_count),
    "seq": parse_tokens,
    "targets": _names,
}


def parsed(said: object, known: Mapping[str, Parse]) -> dict[str, Any]:
    """Returns the options of a question by name; raises InputError naming one that is unknown or cannot be read."""
    said = said or {}
    if not isinstance(said, dict):
        raise InputError(field="options", value=said, allowed="an object")
    for name in said:
        if name not in known:
            raise InputError("unknown option", field=name, allowed=one_of(known))
    return {name: known[name](value, name) for name, value in said.items() if value not in (None, "")}
