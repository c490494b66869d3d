"""What the page asks, as plain data: the model, edits of its config, options; and the command line's documents.

Nothing here knows HTTP. A question names a catalogue model, carries a config.json, or means the model that the server
was started with; paths are not read, since a page may have come from elsewhere than its user.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from threading import Lock
from typing import Any

from asbuilt.api.plan import plan, serve_document, train_document
from asbuilt.api.workload import prices, workload
from asbuilt.catalog import find, machines, slices
from asbuilt.catalog.machine import Machine
from asbuilt.catalog.models import ROWS
from asbuilt.checkpoint.source import Source, open_model
from asbuilt.description import describe
from asbuilt.dtypes import GGUF_BLOCKS, TRAINED
from asbuilt.errors import InputError, near, one_of
from asbuilt.families import read_config, write_config
from asbuilt.families.shared.common import MOST_LAYERS
from asbuilt.kernels.memory.loss import LOSSES
from asbuilt.plan import ServePlan, TrainPlan
from asbuilt.plan.serve import report_workload
from asbuilt.plan.serve.conventions import CHOICES
from asbuilt.plan.serve.engines import ENGINES
from asbuilt.plan.train import report
from asbuilt.plan.train.choices import CHECKPOINTING, OFFLOADS
from asbuilt.plan.train.optimizers import OPTIMIZERS
from asbuilt.plan.train.schedule import SCHEDULES
from asbuilt.plan.train.search import MICRO_BATCHES, search
from asbuilt.plan.train.subject import Subject
from asbuilt.web import curves, options

# Config keys of sizes that the page offers to change, as families of published models call them.
EDITABLE = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "encoder layers": ("encoder_layers",),
    "decoder layers": ("decoder_layers",),
    "model width": ("hidden_size", "n_embd", "d_model"),
    "encoder FFN width": ("encoder_ffn_dim",),
    "decoder FFN width": ("decoder_ffn_dim",),
    "query heads": ("num_attention_heads", "n_head", "n_heads"),
    "KV heads": ("num_key_value_heads",),
    "head width": ("head_dim",),
    "FFN width": ("intermediate_size", "n_inner", "d_ff", "ffn_dim"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "experts per token": ("num_experts_per_tok",),
    "expert width": ("moe_intermediate_size",),
    "shared experts": ("n_shared_experts",),
    "vocabulary": ("vocab_size",),
    "window": ("sliding_window",),
    "latent width of keys and values": ("kv_lora_rank",),
    "state width": ("state_size", "mamba_d_state", "ssm_state_size"),
}
INNER = "text_config"
LAYERS = EDITABLE["layers"]
# Lists, and one text, of a kind or a width for each layer.
PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers", "indexer_types", "layers_block_type", "value_dim")
PATTERN = "hybrid_override_pattern"
NUMBERED = ("moe_layers", "hybrid_layer_ids", "cross_attention_layers")  # lists of the numbers of layers of a kind
# Sizes that some families want to be what others say, as (the others, the size): they follow where they are refused.
FOLLOWS: dict[str, tuple[tuple[str, ...], Callable[..., int]]] = {
    "num_key_value_heads": (("num_attention_heads",), lambda heads: heads),
    "head_dim": (("hidden_size", "num_attention_heads"), lambda width, heads: width // max(1, heads)),
    "decoder_vocab_size": (("vocab_size",), lambda n_vocab: n_vocab),
}
WEIGHTS = (
    "bf16",
    "fp16",
    "fp32",
    "fp8",
    "int8",
    "int4",
    "mxfp4",
    "nvfp4",
    *(name for name in GGUF_BLOCKS if name[0] == "q"),
)
CACHES = ("bf16", "fp16", "fp32", "fp8", "int8", "fp8:head", "int8:head", "int4:head", "q8_0", "q4_0")

# A plan's document, its curves and its layouts are asked for one after another: so many plans are kept for that.
KEPT = 4
_kept: list[tuple[str, Source | None, Any]] = []
_planning = Lock()


def catalogue(given: Source | None) -> dict[str, Any]:
    """Returns what the page offers to choose from; `given` is the model that the server was started with."""
    return {
        "given": None if given is None else given.name,
        "models": sorted(ROWS),
        "machines": machines.names(),
        "slices": {name: slices.profiles(name) for name in slices.CARDS},
        "processors": [name for name, machine in machines.MACHINES.items() if machine.kind == "cpu"],
        "engines": {name: engine.title for name, engine in ENGINES.items()},
        "dtypes": list(WEIGHTS),
        "kv_dtypes": list(CACHES),
        "trained": list(TRAINED),
        "optimizers": list(OPTIMIZERS),
        "checkpointing": list(CHECKPOINTING),
        "schedules": list(SCHEDULES),
        "losses": list(LOSSES),
        "offloads": list(OFFLOADS),
        "conventions": {name: list(values) for name, values in CHOICES.items()},
    }


def answer(kind: str, asked: object, given: Source | None = None) -> dict[str, Any]:
    """Returns the document of one of `ANSWERS`; raises InputError naming the field at fault."""
    if not isinstance(asked, dict):
        raise InputError(field="question", value=asked, allowed="a JSON object")
    known = ("model", "config", "set", "gpu", "options")
    for name in asked:
        if name not in known:
            raise InputError("unknown", field=name, allowed=one_of(known))
    try:
        return ANSWERS[kind](asked, given)
    except RecursionError as error:
        raise InputError("nested too deeply", field="config") from error


def opened(asked: Mapping[str, Any], given: Source | None) -> Source:
    """Returns the model of a question, with the edits of its config applied."""
    source, config = _chosen(asked, given)
    edits = asked.get("set") or {}
    if not isinstance(edits, dict):
        raise InputError(field="set", value=edits, allowed="an object of config keys and values")
    if not edits:
        return source
    changed = edited(_config(source) if config is None else config, edits)
    return replace(source, reading=read_config(changed, source.name), kind="config", path=None, gguf=None)


def _chosen(asked: Mapping[str, Any], given: Source | None) -> tuple[Source, dict[str, Any] | None]:
    """Returns the model before edits, and its config if the question carries it."""
    name, config = asked.get("model"), asked.get("config")
    if config is not None:
        name = "config" if name is None else options.word(name, "model")
        return Source(kind="config", name=name, reading=read_config(config, name)), config
    if given is not None and name in (None, given.name):
        return given, None
    if not isinstance(name, str) or name not in ROWS:
        allowed = "a name from `asbuilt models`, or a config.json"
        raise InputError("unknown model", field="model", value=name, allowed=allowed, fix=near(str(name)[:80], ROWS))
    return open_model(find(name).name), None


def _config(source: Source) -> dict[str, Any]:
    """Returns a config.json that reads back as the model."""
    reading = source.reading
    packing = {} if reading.quantization is None else {"quantization_config": reading.quantization}
    written = write_config(source.family, source.spec, reading.carried, reading.dtype)
    return packing | written


def edited(config: dict[str, Any], edits: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config with other values of whole numbers that it has; `text_config.vocab_size` for a nested key.

    With another number of layers, a list of a kind for each layer, or of their numbers, is cut or repeated. A size that
    must be what others say follows them.
    """
    changed = dict(config)
    for path, value in edits.items():
        outer, _, key = path.rpartition(".")
        inner = changed.get(outer) if outer else changed
        if outer not in ("", INNER) or not isinstance(inner, dict) or key not in inner:
            known = [one["key"] for one in editable(config)]
            raise InputError("not a key of this config", field=path, value=value, allowed=one_of(known))
        number = options.whole(value, path)
        repeated = _repeated(inner, number) if key in LAYERS else {}
        inner = {**inner, key: number, **repeated}
        changed = {**changed, outer: inner} if outer else inner
    return _followed(config, changed, edits)


def _followed(config: dict[str, Any], changed: dict[str, Any], edits: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the changed config in which sizes follow that did before, and without which it would be refused."""
    for _ in FOLLOWS:
        try:
            read_config(changed, "")
        except InputError as error:
            path = error.field.rpartition(": ")[2]
            outer, _, key = path.rpartition(".")
            before, after = (one.get(outer, {}) if outer else one for one in (config, changed))
            old, new = _following(before, key), _following(after, key)
            if path in edits or old is None or old != before[key] or new is None:
                return changed
            inner = {**after, key: new}
            changed = {**changed, outer: inner} if outer else inner
        else:
            return changed
    return changed


def _following(config: object, key: str) -> int | None:
    """Returns what a size is that follows others, None for one that does not, and where those are no numbers."""
    if key not in FOLLOWS or not isinstance(config, Mapping) or key not in config:
        return None
    names, rule = FOLLOWS[key]
    values = [config.get(name) for name in names]
    return rule(*values) if all(isinstance(value, int) for value in values) else None


def _repeated(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    layers = max(0, min(layers, MOST_LAYERS))  # more are refused when the config is read
    lists: dict[str, Any] = {key: said for key in PER_LAYER if isinstance(said := config.get(key), list) and said}
    pattern = config.get(PATTERN)
    lists |= {PATTERN: pattern} if isinstance(pattern, str) and pattern else {}
    repeated = {key: (said * (layers // len(said) + 1))[:layers] for key, said in lists.items()}
    before = next((config[key] for key in LAYERS if isinstance(config.get(key), int) and config[key] > 0), layers)
    for key in NUMBERED:
        if isinstance(said := config.get(key), list) and all(isinstance(one, int) for one in said):
            starts = range(0, layers, max(1, before))
            repeated[key] = [start + one for start in starts for one in said if start + one < layers]
    return repeated


def editable(config: Mapping[str, Any], final: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """Returns the sizes of a config that the page changes: what each is, its key, its value and the one that it has."""
    found = []
    for prefix in ("", f"{INNER}."):
        said, now = ((one.get(INNER) if prefix else one) for one in (config, final or config))
        if not isinstance(said, Mapping) or not isinstance(now, Mapping):
            continue
        for label, key in ((label, key) for label, keys in EDITABLE.items() for key in keys):
            value = said.get(key)
            if isinstance(value, int) and not isinstance(value, bool):
                found.append({"label": label, "key": prefix + key, "value": value, "now": now.get(key)})
    return found


def _machine(asked: Mapping[str, Any]) -> Machine:
    return machines.resolve(options.machine_name(asked.get("gpu"), "gpu"))


def _describe(asked: Mapping[str, Any], given: Source | None) -> dict[str, Any]:
    return describe(opened(asked, given), **options.parsed(asked.get("options"), options.DESCRIBE)).document()


def _once(asked: Mapping[str, Any], given: Source | None, make: Callable[..., Any]) -> Any:  # noqa: ANN401
    """Returns the plan of a question, made once for the few questions that follow each other."""
    text = json.dumps([make.__name__, asked], sort_keys=True)
    with _planning:  # two at once would take as long as one after the other, and one may be enough
        for key, source, made in _kept:
            if key == text and source is given:
                return made
        made = make(asked, given)
        _kept[:] = [(text, given, made), *_kept[: KEPT - 1]]
        return made


def _serve_plan(asked: Mapping[str, Any], given: Source | None) -> tuple[ServePlan, Source]:
    source, said = opened(asked, given), options.parsed(asked.get("options"), options.SERVE)
    said["workload"] = workload(said)
    said["price"] = prices([said["price"]] if "price" in said else [], 1)[0]
    conventions = {name: said.pop(name) for name in options.CONVENTIONS if name in said}
    said = {options.RENAMED.get(name, name): value for name, value in said.items()}
    return plan(source, _machine(asked), conventions=conventions, **said), source


def _serve(asked: Mapping[str, Any], given: Source | None) -> dict[str, Any]:
    made, source = _once(asked, given, _serve_plan)
    return serve_document(made, source.reading.defaults)


def _layouts(asked: Mapping[str, Any], given: Source | None) -> dict[str, Any]:
    made, _ = _once(asked, given, _serve_plan)
    return _serve(asked, given) | {"layouts": report_workload.layouts(made)}


def _curves(asked: Mapping[str, Any], given: Source | None) -> dict[str, Any]:
    return curves.document(_once(asked, given, _serve_plan)[0])


def _train_plan(asked: Mapping[str, Any], given: Source | None) -> tuple[TrainPlan, Source]:
    source = opened(asked, given)
    return plan(source, _machine(asked), task="train", **options.parsed(asked.get("options"), options.TRAIN)), source


def _train(asked: Mapping[str, Any], given: Source | None) -> dict[str, Any]:
    made, source = _once(asked, given, _train_plan)
    return train_document(made, source.reading)


def _ranks(asked: Mapping[str, Any], given: Source | None) -> dict[str, Any]:
    return curves.ranks(_once(asked, given, _train_plan)[0])


def _ranked(asked: Mapping[str, Any], given: Source | None) -> dict[str, Any]:
    """Returns the plan with the layouts that fit; other micro-batches are tried where none is given, as in the CLI."""
    made, source = _once(asked, given, _train_plan)
    run = made.trial.options
    free = "batch" not in options.parsed(asked.get("options"), options.TRAIN)
    found = search(Subject(source.spec), made.machine, run, batches=MICRO_BATCHES if free else (run.batch,))
    return _train(asked, given) | {"search": report.ranked_document(found)}


def _sizes(asked: Mapping[str, Any], given: Source | None) -> dict[str, Any]:
    source, config = _chosen(asked, given)
    if config is None and source.family:
        config = _config(source)
    edits = asked.get("set") or {}
    final = None if config is None else edited(config, edits)
    return {"name": source.name, "config": final, "editable": [] if config is None else editable(config, final)}


ANSWERS: dict[str, Callable[[Mapping[str, Any], Source | None], dict[str, Any]]] = {
    "describe": _describe,
    "serve": _serve,
    "train": _train,
    "curves": _curves,
    "ranks": _ranks,
    "layouts": _layouts,
    "ranked": _ranked,
    "config": _sizes,
}
SLOW = ("layouts", "ranked")  # that may take seconds
