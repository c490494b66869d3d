"""The settings of fine-tuning, and what they need of the other sections. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal, get_args

from asbuilt.errors import InputError
from asbuilt.train.settings import Data, Experts, require_among, require_from

if TYPE_CHECKING:
    from asbuilt.train.recipe import Recipe

Kind = Literal["full", "lora", "qlora"]
KINDS: tuple[Kind, ...] = get_args(Kind)
ADAPTERS, PREFERENCES = ("rank", "alpha", "targets"), ("beta", "smoothing")
CHATS = ("chat", "preferences", "context", "batch", "validation")  # what is read of the data section for chats


@dataclass(frozen=True, kw_only=True)
class Tune:
    """Which weights are trained, and how strongly preferences between answers weigh."""

    kind: Kind = "full"
    """full: all weights; lora: low-rank adapters alone, the rest is frozen; qlora: the same, with its blocks packed."""
    rank: int = 8
    """Width between the two matrices of an adapter."""
    alpha: float = 16.0
    """An adapter's output is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Linear maps with adapters: names (q, down) or patterns of paths (blocks.1?.*); none for all of the blocks."""
    beta: float = 0.1
    """Factor on the margin of data.preferences (DPO): a larger one stays closer to the model at the start."""
    smoothing: float = 0.0
    """Probability that a preference is the wrong way round (DPO)."""

    def __post_init__(self) -> None:
        require_among("tune.kind", self.kind, KINDS)
        require_from("tune.rank", self.rank, 1)
        for name in ("alpha", "beta"):
            if not 0.0 < getattr(self, name) < 1e6:
                raise InputError(field=f"tune.{name}", value=getattr(self, name), allowed="a number above 0")
        if not 0.0 <= self.smoothing < 0.5:
            raise InputError(field="tune.smoothing", value=self.smoothing, allowed="a number from 0 to below 0.5")

    @property
    def adapters(self) -> bool:
        """Whether adapters alone are trained."""
        return self.kind != "full"


def require_tunable(recipe: Recipe) -> None:
    """Raises InputError for settings that do not work together, naming one of them."""
    given, data, tune = recipe.model, recipe.data, recipe.tune
    said = {name: getattr(data, name) for name in ("text", "chat", "preferences") if getattr(data, name)}
    if len(said) > 1:
        raise InputError("only one is read", field=" and ".join(f"data.{name}" for name in said), fix="leave one")
    if tune.adapters and not given.weights:
        raise InputError(
            "adapters are trained beside the weights of a checkpoint",
            field="tune.kind",
            value=tune.kind,
            fix="give model.source and model.weights=true",
        )
    if tune.adapters and recipe.experts.bias_rate:
        _refuse("experts.bias_rate", recipe.experts.bias_rate, Experts.bias_rate, "with adapters nothing else changes")
    if not tune.adapters:
        _require_unused(tune, ADAPTERS, 'has no effect with tune.kind="full"')
    if not data.preferences:
        _require_unused(tune, PREFERENCES, "has no effect without data.preferences")
    elif recipe.step.z_loss:
        _refuse("step.z_loss", recipe.step.z_loss, 0.0, "not part of the loss of data.preferences")
    if data.chat or data.preferences:
        _require_own_tokenizer(recipe)


def _require_own_tokenizer(recipe: Recipe) -> None:
    if not recipe.model.source:
        raise InputError(
            "chats are written with the tokenizer of a checkpoint", field="model.source", allowed="a checkpoint"
        )
    if recipe.data.tokenizer != Data.tokenizer:
        _refuse("data.tokenizer", recipe.data.tokenizer, Data.tokenizer, "chats are written with the model's own")
    others = tuple(one.name for one in fields(Data) if one.name not in CHATS)
    _require_unused(recipe.data, others, "has no effect on chats", "data")


def _require_unused(section: Tune | Data, names: tuple[str, ...], why: str, name: str = "tune") -> None:
    for one in fields(section):
        if one.name in names and getattr(section, one.name) != one.default:
            _refuse(f"{name}.{one.name}", getattr(section, one.name), one.default, why)


def _refuse(field: str, value: object, default: object, why: str) -> None:
    raise InputError(why, field=field, value=value, fix=f"leave it out (it is then {default!r})")
