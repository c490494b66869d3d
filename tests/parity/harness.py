"""Parity with transformers: two models that met only in a checkpoint folder, compared position by position.

transformers saves and asbuilt loads (direction A), or asbuilt saves and transformers loads (direction B); each side
reads config.json itself and makes its own tables. A family joins with one file in cases/: a `ParityCase` that draws
small transformers configs whose thresholds all lie within the text. What is not a language model that predicts the next
token has a `Kind` of its own, in a file beside this one. Shapes: batch B, tokens T.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from asbuilt.checkpoint.load import load
from asbuilt.checkpoint.save import save
from asbuilt.checkpoint.source import Source, open_model
from asbuilt.families import read_config
from asbuilt.nn import build
from asbuilt.nn.embedding import TokenEmbedding
from asbuilt.nn.model import Model
from asbuilt.nn.positions import BiasTable, LearnedPositions
from asbuilt.spec import MixtureOfExperts, walk
from asbuilt.spec import Model as ModelSpec
from asbuilt.spec.part import Kernel

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()  # thresholds within the text are unusual, and warned of

# Of the largest number at the same layer and position, in float32. DESIGN.md allows 1e-4; but the two forms of gelu
# differ by 9e-5 at the least, while rounding was never seen above 1e-5.
TOLERANCE = 3e-5
KERNELS: tuple[Kernel, ...] = ("reference", "fused")
BATCH, TOKENS = 2, 48
# Every run draws anew; PARITY_SEED, printed at the end of each run, draws the same again.
SEED = os.environ.get("PARITY_SEED") or str(random.SystemRandom().randrange(2**32))

COMPUTED = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")  # buffers that follow from a config
FROZEN = ("e_score_correction_bias", "expert_bias")  # some classes have as parameters what others have as buffers

Draw = Callable[[random.Random], PreTrainedConfig]
Inputs = dict[str, Tensor]  # what transformers' model is called with, by its names, each (B, ...)
Trace = dict[str, Tensor]  # path -> (B, T, width), in the order of computation


class Kind:
    """How models of one kind are made, fed and traced on either side; these here predict the next token.

    Another kind overrides what differs. `decodes` says whether the tests of cached and greedy decoding apply, `dtype`
    in which numbers both sides compute.
    """

    decodes = True
    dtype = torch.float32

    def make(self, config: PreTrainedConfig) -> PreTrainedModel:
        """Returns transformers' model of the config."""
        return AutoModelForCausalLM.from_config(config)

    def load(self, folder: Path, **settings: object) -> Any:  # noqa: ANN401  # a model, or a model and what was amiss
        """Returns what transformers' `from_pretrained` gives with these settings."""
        return AutoModelForCausalLM.from_pretrained(folder, **settings)

    def published(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns what transformers saved under the hub's names, where it uses others."""
        return tensors

    def inputs(self, rng: random.Random, spec: ModelSpec) -> Inputs:
        """Returns what both sides are given."""
        return {"input_ids": random_tokens(rng, spec.n_vocab)}

    def theirs(self, model: PreTrainedModel, inputs: Inputs) -> Trace:
        """Returns what transformers' model makes of the inputs, by our paths."""
        return theirs(model, inputs["input_ids"])

    def ours(self, model: Model, inputs: Inputs, kernel: Kernel = "fused") -> Trace:
        """Returns the same of our model."""
        return ours(model, inputs["input_ids"], kernel)


class Exact(Kind):
    """In float64: for models that as drawn amplify either side's rounding in float32 beyond the tolerance."""

    dtype = torch.float64


CAUSAL, EXACT = Kind(), Exact()


class Widened(TorchFunctionMode):
    """Within it float64 is computed with where transformers' classes say float32."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # noqa: ANN401
        """Calls the function with the wider dtype in place of float32."""
        if func is Tensor.float:
            return args[0].double()
        wide = [torch.float64 if one is torch.float32 else one for one in args]
        named = {name: torch.float64 if one is torch.float32 else one for name, one in (kwargs or {}).items()}
        return func(*wide, **named)


@dataclass(frozen=True, kw_only=True)
class ParityCase:
    """A family and its small configs: variant -> function that draws one from a random source.

    `inert_weights` maps the ends of parameter paths that cannot change any output to the reason why, in the variants
    `inert_in` (None for all), `inert_fields` so
    the paths of fields; `idle` are the beginnings of paths of what is held and never runs, `choosing` what is in the
    paths of parameters that only decide what is computed. `attentions` are the implementations of transformers that
    compute all of what the family does; with `caches` its cache gives what its whole passes do.
    """

    family: str
    configs: dict[str, Draw]
    kind: Kind = CAUSAL
    inert_weights: dict[str, str] = field(default_factory=dict)
    inert_in: tuple[str, ...] | None = None
    inert_fields: dict[str, str] = field(default_factory=dict)
    idle: tuple[str, ...] = ()
    choosing: tuple[str, ...] = ()
    attentions: tuple[str, ...] = ("eager", "sdpa")
    caches: bool = True

    def config(self, variant: str) -> PreTrainedConfig:
        """The variant's config of this run."""
        return self.configs[variant](self.random(variant))

    def random(self, *about: str) -> random.Random:
        """A source of its own for each use, so that one test alone draws what it draws among all."""
        return random.Random("/".join((SEED, self.family, *about)))


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The largest relative difference and its path, and the first path above the tolerance, None where none is."""

    worst: float
    where: str
    first: str | None


@dataclass(frozen=True, kw_only=True)
class Result:
    """One comparison, as the table at the end of the run counts it."""

    family: str
    label: str
    difference: Difference


RESULTS: list[Result] = []


@torch.no_grad()
def randomise(module: nn.Module, seed: int) -> None:
    """Draws every parameter and persistent buffer: a lost bias or a swapped gain would not show at first values.

    Matrices are scaled by their inputs so that the stream stays O(1) and scores spread by a few units.
    """
    generator = torch.Generator().manual_seed(seed)
    seen: set[int] = set()
    for owner in module.modules():
        own = owner.named_parameters(recurse=False)
        named = {name: p for name, p in own if p.requires_grad or name in FROZEN}  # others are computed
        kept = owner.named_buffers(recurse=False)
        named |= {n: b for n, b in kept if n not in owner._non_persistent_buffers_set and n not in COMPUTED}
        for name, tensor in named.items():
            if id(tensor) not in seen and tensor.is_floating_point():  # a tied head is drawn once
                seen.add(id(tensor))
                tensor.copy_(_drawn(owner, name, tensor.shape, generator))


def _drawn(owner: nn.Module, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    normal = torch.randn(shape, generator=generator)
    if (
        "correction" in name or name in FROZEN
    ):  # of scores within 0 to 1: a larger one would choose the same experts for every token
        return 0.1 * normal
    if name.endswith(("_min", "_max")):  # bounds of a clipped map, which cut a good part of numbers about 1 large
        return (0.5 + 0.3 * normal.abs()) * (-1 if name.endswith("_min") else 1)
    if tuple(shape) == (1,) and "gate" in name:  # whose tanh multiplies all that a branch gives: far from 0
        return 1 + 0.3 * normal.abs()
    if len(shape) < 2:
        return 1 + 0.3 * normal if name == "weight" else 0.5 * normal
    if isinstance(owner, nn.Embedding | TokenEmbedding | LearnedPositions | BiasTable):
        return normal
    if len(shape) == 4 and shape[-1] == 1:  # a convolution of single pixels is a linear map
        return normal * 1.2 / math.sqrt(shape[1])
    return normal * 1.2 / math.sqrt(shape[0] if isinstance(owner, Conv1D) else shape[-1])


def random_tokens(rng: random.Random, n_vocab: int, tokens: int = TOKENS) -> Tensor:
    """Token ids (B, T)."""
    return torch.tensor([[rng.randrange(n_vocab) for _ in range(tokens)] for _ in range(BATCH)])


def transformers_saves(config: PreTrainedConfig, seed: int, folder: Path, kind: Kind = CAUSAL) -> None:
    """Writes a randomised transformers model of the config."""
    model = kind.make(config)
    randomise(model, seed)
    model.save_pretrained(folder)


def transformers_loads(folder: Path, attention: str = "eager", kind: Kind = CAUSAL) -> PreTrainedModel:
    """Returns the folder's model, in the kind's dtype; fails where transformers finds the tensors wanting."""
    load = kind.load if kind.dtype is torch.float32 else _widened(kind.load)  # which makes the rotary numbers too
    loaded = load(
        folder,
        dtype=torch.float32,
        attn_implementation=attention,
        experts_implementation="eager",  # the faster ones want widths that are multiples of 16 bytes
        output_loading_info=True,
    )
    model, info = loaded
    assert not any(info.values()), info
    if kind.dtype is not torch.float32:  # else a cast would take complex numbers their imaginary part
        model.to(kind.dtype).forward = _widened(model.forward)
    return model.eval()


def _widened(run: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(run)
    def wide(*args: object, **named: object) -> Any:  # noqa: ANN401
        with Widened():
            return run(*args, **named)

    return wide


def asbuilt_saves(config: PreTrainedConfig, seed: int, folder: Path) -> None:
    """Writes a randomised asbuilt model of the config, under our own config.json.

    Prediction layers are left out, as transformers does: it takes them for tensors of another model.
    """
    reading = read_config(config.to_dict(), folder.name)
    model = build(reading.spec.without_extras, seed=None)
    randomise(model, seed)
    save(model, folder, family=reading.family, carried=reading.carried)


def asbuilt_resaves(folder: Path, again: Path) -> None:
    """Writes what asbuilt loads from a folder to another."""
    source = open_model(folder)
    save(load(source), again, family=source.family, carried=source.reading.carried)


def asbuilt_loads(folder: Path, spec: ModelSpec | None = None, kind: Kind = CAUSAL) -> Model:
    """Returns the folder's model in the kind's dtype, or another spec with the folder's weights."""
    source = open_model(folder)
    return load(source if spec is None else with_spec(source, spec), dtype="float32").to(kind.dtype)


def with_spec(source: Source, spec: ModelSpec) -> Source:
    """Returns the source as if its config had said `spec`."""
    return replace(source, reading=replace(source.reading, spec=spec))


@torch.inference_mode()
def theirs(model: PreTrainedModel, tokens_BT: Tensor) -> Trace:
    """The stream before the blocks, after each, the last one normed, and logits, by our paths."""
    out: Any = model(tokens_BT, output_hidden_states=True, use_cache=False)
    first, *blocks, normed = out.hidden_states
    stream = {f"blocks.{i}": hidden for i, hidden in enumerate(blocks)}
    return {"embedding": first, **stream, "norm": normed, "head": out.logits}


def ours(model: Model, tokens_BT: Tensor, kernel: Kernel = "fused") -> Trace:
    """The same of our model."""
    return traced(model, lambda: model(tokens_BT, kernel=kernel))


@torch.inference_mode()
def traced(model: Model, run: Callable[[], Tensor]) -> Trace:
    """What `run` makes of our model, seen by hooks on its modules; without a head it ends in the normed stream."""
    trace: Trace = {}

    def keep(path: str, module: nn.Module, args: tuple[Tensor, ...], result: Tensor) -> None:
        trace[path] = result

    def keep_input(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        trace["embedding"] = args[0]

    def keep_normed(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        # where there is no final norm, the stream itself; at the width of the table that the head multiplies
        project = getattr(module, "project", None)
        trace["norm"] = args[0] if project is None else project(args[0])

    paths = [f"blocks.{i}" for i in range(len(model.blocks) - 1)]
    hooks = [model.blocks[0].register_forward_pre_hook(keep_input)]
    if model.head is not None:
        hooks.append(model.head.register_forward_pre_hook(keep_normed))
    hooks += [model.get_submodule(path).register_forward_hook(partial(keep, path)) for path in paths]
    try:
        trace["norm" if model.head is None else "head"] = run()
    finally:
        for hook in hooks:
            hook.remove()
    return trace


def relative(have: Tensor, want: Tensor) -> Tensor:
    """max|have - want| / max|want| over the last dimension; what is no number counts as infinite."""
    assert have.shape == want.shape, f"{tuple(have.shape)} is not {tuple(want.shape)}"
    return ((have - want).abs().amax(-1) / want.abs().amax(-1)).nan_to_num(nan=math.inf)


def compare(have: Trace, want: Trace) -> Difference:
    """Compares two traces per layer and position."""
    assert list(have) == list(want), f"{list(have)} are not {list(want)}"
    by_path = {path: relative(have[path], want[path]) for path in want}
    where = max(by_path, key=lambda path: float(by_path[path].max()))
    position = int(by_path[where].amax(0).argmax())
    first = next((path for path, found in by_path.items() if not bool((found <= TOLERANCE).all())), None)
    return Difference(worst=float(by_path[where].max()), where=f"{where} at token {position}", first=first)


def check(family: str, label: str, have: Trace, want: Trace) -> None:
    """Compares, keeps the result for the table, and fails naming the first path that differs."""
    found = compare(have, want)
    RESULTS.append(Result(family=family, label=label, difference=found))
    assert found.first is None, (
        f"{family} {label}: first differs at {found.first}, most by {found.worst:.2e} at {found.where}; "
        f"PARITY_SEED={SEED} draws it again"
    )


def cacheable(spec: ModelSpec) -> int:
    """Up to how many tokens no expert can be full, so that decoding is a whole pass."""
    blocks = [part for block in spec.blocks for _, part in walk(block)]
    full = [part.capacity for part in blocks if isinstance(part, MixtureOfExperts) and part.capacity is not None]
    return min((TOKENS, *full))


# Several spellings say the same here, so these are compared by what comes out.
SPELLED = (
    "hidden_act",
    "mlp_hidden_act",
    "hidden_activation",
    "activation_function",
    "activation",
    "projector_hidden_act",
    "classifier_activation",
    "rope_parameters",
    "feed_forward_proj",
    "dense_act_fn",
)


def settings(folder: Path) -> dict[str, Any]:
    """What transformers reads of a folder's config, but for what has several spellings."""
    return dict(_said(AutoConfig.from_pretrained(folder).to_dict(), ""))


def _said(settings: dict[str, Any], outside: str) -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, dict) and key.endswith("_config"):
            yield from _said(value, f"{key}.")
        elif key not in ("_name_or_path", *SPELLED):
            yield f"{outside}{key}", value
