"""What families with state spaces share: keys of their steps and of what does not change them, and names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asbuilt.families.shared.hybrid import first
from asbuilt.families.shared.key import Irrelevant, Key, Only, Size, Values, depth, eps, tied
from asbuilt.families.shared.names import Names
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader, is_number
from asbuilt.spec import (
    Block,
    Branch,
    Head,
    LanguageModel,
    Mamba2,
    Mixer,
    RMSNorm,
    ShortConvolution,
    TiedHead,
    TokenEmbedding,
)

INITIAL = Irrelevant(
    "only of the initial weights",
    "time_step_min",
    "time_step_max",
    "time_step_floor",
    "time_step_scale",
    "time_step_init_scheme",
    "rescale_prenorm_residual",
)
COMPUTED = Irrelevant(
    "how it is computed, not what",
    "chunk_size",
    "use_mamba_kernels",
    "residual_in_fp32",
    "use_mambapy",
    "use_associative_scan",
)
OF_MAMBA = {
    "into": "in_proj",
    "conv": "conv1d",
    "select": "x_proj",
    "dt": "dt_proj",
    "a_log": "A_log",
    "d": "D",
    "out": "out_proj",
}
OF_MAMBA2 = {
    "into": "in_proj",
    "conv": "conv1d",
    "a_log": "A_log",
    "d": "D",
    "dt_bias": "dt_bias",
    "gain": "norm.weight",
    "out": "out_proj",
}


# Positions of a model without positions: files say none, and the state is of one size for any text.
UNLIMITED = 2**20


def stems(branch: str, mixer: str, names: Mapping[str, str] = OF_MAMBA2) -> dict[str, str]:
    """Returns the stems of a state space in the branch of this name, whose tensors follow `mixer`."""
    return {f"{branch}.body.{part}": f"{mixer}.{name}" for part, name in names.items()}


def names(of: Mapping[str, str]) -> Names:
    """Returns the names of a stack of state spaces alone."""
    return Names(
        stems={"mixer.norm": "norm"} | stems("mixer", "mixer", of),
        outside={"embedding": "backbone.embeddings", "norm": "backbone.norm_f", "head": "lm_head"},
        layers="backbone.layers",
    )


def stack(mixer: Mixer, *, n_layers: int, n_vocab: int, eps: float, tied: bool, name: str) -> LanguageModel:
    """Returns the model of layers of a mixer alone, each after a norm."""
    norm = RMSNorm(d=mixer.d_model, eps=eps)
    table: dict[str, Any] = {"n_vocab": n_vocab, "d_model": mixer.d_model}
    return LanguageModel(
        embedding=TokenEmbedding(**table),
        blocks=(Block(branches=(Branch(name="mixer", body=mixer, norm=norm),)),) * n_layers,
        norm=norm,
        head=(TiedHead if tied else Head)(**table),
        max_positions=UNLIMITED,
        name=name,
    )


def of_stack(n_vocab: int, d_model: int, n_layers: int, ties: bool) -> tuple[Key, ...]:
    """Returns the keys of such a model beside those of its mixer."""
    return (
        Size("vocab_size", "n_vocab", default=n_vocab),
        Size("hidden_size", "d_model", default=d_model),
        depth("num_hidden_layers", n_layers),
        eps("layer_norm_epsilon", 1e-5),
        tied(ties),
        silu("hidden_act"),
        INITIAL,
        COMPUTED,
    )


def silu(key: str) -> Only:
    """Returns the key of the activation after the convolution."""
    return Only(key, "silu", "swish", None, reason="the convolution is followed by SiLU")


def mamba2(
    d_model: int,
    n_heads: int,
    d_head: int,
    d_state: int,
    n_groups: int,
    kernel: int,
    conv_bias: bool,
    **fields: Any,  # noqa: ANN401
) -> Mamba2:
    """Returns Mamba-2 of these sizes, with the convolution that it needs; other `fields` are its own."""
    channels = n_heads * d_head + 2 * n_groups * d_state
    conv = ShortConvolution(channels=channels, kernel=kernel, bias=conv_bias)
    sizes: dict[str, Any] = {"n_heads": n_heads, "d_head": d_head, "d_state": d_state, "n_groups": n_groups}
    return Mamba2(d_model=d_model, conv=conv, **sizes, **fields)


# Files without an upper limit say infinity, or where that is no JSON 1e308.
NO_LIMIT, LARGEST = 1e38, 1e308


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class StepLimits:
    """`key`: the least and the largest step; missing, 0 and infinity."""

    key: str = "time_step_limit"

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads both limits."""
        reader.irrelevant(self.key, "carried, since there are several ways of saying that there is no limit")
        said = reader.config[self.key] if reader.given(self.key) else [0.0, NO_LIMIT]
        ok = isinstance(said, list | tuple) and len(said) == 2
        least, most = map(_number, said) if ok else (None, None)
        ok = least is not None and most is not None and 0 <= least < min(most, NO_LIMIT)
        reader.require(self.key, ok, "two numbers, the least and the largest step")
        values["dt_min"], values["dt_max"] = least, None if most is None or most >= NO_LIMIT else most

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the limits; where there are none, as they were carried."""
        part, said = first(Mamba2)(parts), parts.carried.get(self.key)
        if part.dt_min > 0 or part.dt_max is not None:
            return {self.key: [part.dt_min, LARGEST if part.dt_max is None else part.dt_max]}
        unlimited = said is None or (_number(said[0]) == 0 and (_number(said[1]) or 0) >= NO_LIMIT)
        return {} if unlimited else {self.key: [0.0, LARGEST]}


def _number(said: object) -> float | None:
    """Returns a limit as a number; None for what is none. transformers writes infinity as an object."""
    if said in (math.inf, {"__float__": "Infinity"}):
        return math.inf
    return float(said) if is_number(said) else None  # type: ignore[arg-type]  # pyright: ignore
