"""Pooling hidden states into a sentence vector, as configured by folders of sentence-transformers.

`modules.json` lists the modules, one folder each; `sentence_bert_config.json` states how many tokens are read, and
`config_sentence_transformers.json` the prompts. Both spellings of the pooling mode are read: the booleans used before
version 5.4, and `pooling_mode`. Any other module is refused, above all code in the folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from asbuilt.checkpoint.safetensors import Reader
from asbuilt.errors import InputError, near, one_of
from asbuilt.files import read_json, read_object
from asbuilt.formats.safetensors import read_folder

LARGEST_FILE = 2**20
LIST, PROMPTS = "modules.json", "config_sentence_transformers.json"
LIMITS = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
Mode = Literal["first", "max", "mean", "mean_sqrt_len", "weighted_mean", "last"]
# Their names, and those before 5.4, in the order in which the vectors of several modes are concatenated.
MODES: dict[str, Mode] = {
    "cls": "first",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weighted_mean",
    "lasttoken": "last",
}
OLDER = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
WIDTHS = ("embedding_dimension", "word_embedding_dimension")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "ReLU": F.relu,
    "GELU": F.gelu,
    "SiLU": F.silu,
    "Sigmoid": torch.sigmoid,
}
OURS = "sentence_transformers."
STEPS = ("Transformer", "Pooling", "Dense", "Normalize", "Dropout")


@dataclass(frozen=True, kw_only=True)
class Dense:
    """A linear layer after the pooling, with its weights in a folder, and its activation."""

    folder: Path
    d_in: int
    d_out: int
    bias: bool
    activation: str

    def __call__(self, vectors_BM: Tensor) -> Tensor:
        """Returns (B, d_out); raises InputError if the folder's weights do not have the stated shapes."""
        reader, stored = None, read_folder(self.folder)
        shapes = {"linear.weight": (self.d_out, self.d_in)} | ({"linear.bias": (self.d_out,)} if self.bias else {})
        found = {name: tensor.shape for name, tensor in stored.items()}
        if found != shapes:
            raise InputError(
                "not the weights of a linear map", field=str(self.folder), value=found, allowed=f"{shapes}"
            )
        reader = Reader(stored)
        weights = {name: reader(name).float() for name in shapes}
        made = F.linear(vectors_BM, weights["linear.weight"], weights.get("linear.bias"))
        return ACTIVATIONS[self.activation](made)


@dataclass(frozen=True, kw_only=True)
class Pooling:
    """How a text is encoded and pooled: by default the normalised mean over its tokens.

    The vectors of all `modes` are concatenated; `steps` follow in sequence. A text is truncated to `max_tokens`,
    lowercased if `lower`, and preceded by the requested prompt; without `include_prompt` the prompt is read but not
    pooled.
    """

    modes: tuple[Mode, ...] = ("mean",)
    include_prompt: bool = True
    steps: tuple[Dense | Literal["normalise"], ...] = ("normalise",)
    max_tokens: int | None = None
    lower: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None

    @property
    def how(self) -> str:
        """The modes joined into one name."""
        return "+".join(self.modes)

    @property
    def normalise(self) -> bool:
        """Whether the vectors have length 1."""
        return "normalise" in self.steps[-1:]

    def prompt(self, name: str | None = None) -> str:
        """Returns the prompt of this name, by default the folder's; raises InputError for an unknown name."""
        name = self.default_prompt if name is None else name
        if name is not None and name not in self.prompts:
            raise InputError(
                "unknown prompt",
                field="prompt-name",
                value=name,
                allowed=one_of(self.prompts or ["left out: the folder has none"]),
                fix=near(name, self.prompts),
            )
        return "" if name is None else self.prompts[name]

    def vectors(self, states_BTM: Tensor, valid_BT: Tensor) -> Tensor:
        """Returns one vector per row, pooled over valid tokens; weights count positions from 1."""
        made = torch.cat([_POOL[mode](states_BTM, valid_BT) for mode in self.modes], -1)
        for step in self.steps:
            made = F.normalize(made, dim=-1) if step == "normalise" else step(made)
        return made


def _first(states_BTM: Tensor, valid_BT: Tensor) -> Tensor:
    return states_BTM[torch.arange(len(states_BTM)), valid_BT.int().argmax(1)]


def _last(states_BTM: Tensor, valid_BT: Tensor) -> Tensor:
    last_B = valid_BT.shape[1] - 1 - valid_BT.flip(1).int().argmax(1)
    return states_BTM[torch.arange(len(states_BTM)), last_B]


def _largest(states_BTM: Tensor, valid_BT: Tensor) -> Tensor:
    return states_BTM.masked_fill(~valid_BT[:, :, None], -torch.inf).amax(1)


def _weighted(states_BTM: Tensor, weights_BT: Tensor, power: float = 1.0) -> Tensor:
    return (states_BTM * weights_BT[:, :, None]).sum(1) / weights_BT.sum(1)[:, None] ** power


_POOL: dict[Mode, Callable[[Tensor, Tensor], Tensor]] = {
    "first": _first,
    "max": _largest,
    "mean": lambda x, valid: _weighted(x, valid.float()),
    "mean_sqrt_len": lambda x, valid: _weighted(x, valid.float(), 0.5),
    "weighted_mean": lambda x, valid: _weighted(x, valid * torch.arange(1, valid.shape[1] + 1.0)),
    "last": _last,
}


def read_pooling(folder: Path | None, d_model: int | None = None) -> Pooling:
    """Returns the pooling that a folder's files configure, by default the normalised mean.

    Raises InputError for an unknown module, and for widths that do not match each other or `d_model`.
    """
    if folder is None:
        return Pooling()
    said: dict[str, Any] = {} if not os.path.lexists(folder / LIST) else _steps(folder, d_model)
    limits = next((folder / name for name in LIMITS if os.path.lexists(folder / name)), None)
    return Pooling(**said, **_limits(limits), **_prompts(folder / PROMPTS))


def _steps(folder: Path, width: int | None) -> dict[str, Any]:
    modes, include, steps = ("mean",), True, []
    for number, module in enumerate(_list(folder / LIST)):
        kind = _kind(folder, module)
        if (kind == "Transformer") is not (number == 0):
            raise InputError(
                "modules out of order",
                field=f"{folder.name}/{LIST}",
                value=kind,
                allowed="Transformer first, then the others",
            )
        if kind == "Pooling":
            modes, include = _pooling(folder / _inside(folder, module.get("path")) / "config.json", width)
            width = None if width is None else len(modes) * width
        elif kind == "Dense":
            steps.append(_dense(folder / _inside(folder, module.get("path")), width))
            width = steps[-1].d_out
        elif kind == "Normalize":
            steps.append("normalise")
    return {"modes": modes, "include_prompt": include, "steps": tuple(steps)}


def _list(path: Path) -> list[Any]:
    said = read_json(path, LARGEST_FILE)
    if not isinstance(said, list):
        raise InputError(field=str(path), value=said, allowed="a list of modules")
    return said


def _kind(folder: Path, module: Any) -> str:  # noqa: ANN401  any JSON value
    said = module.get("type") if isinstance(module, dict) else module
    kind = said.rsplit(".", 1)[-1] if isinstance(said, str) and said.startswith(OURS) else said
    if kind not in STEPS:
        raise InputError(
            "unknown module",
            field=f"{folder.name}/{LIST}",
            value=kind,
            allowed=one_of(STEPS),
            fix="code in a model folder is never run",
        )
    return kind


def _inside(folder: Path, path: object) -> str:
    """Returns the name of a folder inside `folder`."""
    if not isinstance(path, str) or Path(path).name != path or path in ("", ".", ".."):
        raise InputError(field=f"{folder.name}/{LIST}: path", value=path, allowed="the name of a folder")
    return path


def _pooling(path: Path, width: int | None) -> tuple[tuple[Mode, ...], bool]:
    said = read_object(path, LARGEST_FILE)
    strange = [key for key in said if key.startswith("pooling_mode") and key not in ("pooling_mode", *OLDER)]
    if strange:
        raise InputError("unknown pooling", field=str(path), value=strange, allowed=one_of(OLDER))
    older = [name for key, name in OLDER.items() if _flag(said, key, False, path)]
    chosen = said.get("pooling_mode", older or ["mean"])
    chosen = [chosen] if isinstance(chosen, str) else chosen
    if (
        not isinstance(chosen, list)
        or not chosen
        or not all(isinstance(name, str) and name in MODES for name in chosen)
    ):
        raise InputError("unknown pooling", field=f"{path}: pooling_mode", value=chosen, allowed=one_of(MODES))
    stated = next((said[key] for key in WIDTHS if key in said), None)
    if None not in (width, stated) and stated != width:
        raise InputError(field=f"{path}: {WIDTHS[0]}", value=stated, allowed=f"{width}, the width of the model")
    return tuple(MODES[name] for name in chosen), _flag(said, "include_prompt", True, path)


def _flag(said: dict[str, Any], key: str, default: bool, path: Path) -> bool:
    value = said.get(key, default)
    if not isinstance(value, bool):
        raise InputError(field=f"{path}: {key}", value=value, allowed="true or false")
    return value


def _dense(folder: Path, width: int | None) -> Dense:
    path = folder / "config.json"
    said = read_object(path, LARGEST_FILE)
    widths = [said.get(key) for key in ("in_features", "out_features")]
    if not all(type(n) is int and 0 < n < 2**24 for n in widths) or (width is not None and widths[0] != width):
        raise InputError(
            "the widths do not match",
            field=str(path),
            value=widths,
            allowed=f"such that in_features is {'a whole number' if width is None else width}",
        )
    activation = str(said.get("activation_function", "torch.nn.modules.activation.Tanh")).rsplit(".", 1)[-1]
    if activation not in ACTIVATIONS:
        raise InputError(
            "unknown activation", field=f"{path}: activation_function", value=activation, allowed=one_of(ACTIVATIONS)
        )
    for key in ("module_input_name", "module_output_name"):
        if said.get(key) not in (None, "sentence_embedding"):
            raise InputError(field=f"{path}: {key}", value=said[key], allowed="sentence_embedding")
    bias = _flag(said, "bias", True, path)
    return Dense(folder=folder, d_in=widths[0], d_out=widths[1], bias=bias, activation=activation)  # type: ignore[arg-type]


def _limits(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    said = read_object(path, LARGEST_FILE)
    most = said.get("max_seq_length")
    if most is not None and not (type(most) is int and most >= 1):
        raise InputError(field=f"{path}: max_seq_length", value=most, allowed="a whole number of at least 1")
    return {"max_tokens": most, "lower": _flag(said, "do_lower_case", False, path)}


def _prompts(path: Path) -> dict[str, Any]:
    said = read_object(path, LARGEST_FILE) if os.path.lexists(path) else {}
    prompts, name = said.get("prompts") or {}, said.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise InputError(field=f"{path}: prompts", value=prompts, allowed="an object of strings")
    if name is not None and name not in prompts:
        raise InputError(field=f"{path}: default_prompt_name", value=name, allowed=one_of([*prompts, "null"]))
    return {"prompts": prompts, "default_prompt": name}
