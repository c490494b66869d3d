"""The mamba family: Mamba alone in every layer. Gu & Dao 2023 (arXiv 2312.00752)."""

from __future__ import annotations

import math
from typing import Any

from asbuilt.families.shared import state_space
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.hybrid import first
from asbuilt.families.shared.key import Flag, Irrelevant, Key, Only, Size, Values
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.spec import LanguageModel, Mamba, RMSNorm, ShortConvolution


class _Inner:
    """`intermediate_size`; missing, `expand` times the stream. Where both are there `expand` means nothing."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        usual = reader.size("expand", default=2) * values["d_model"]
        values["d_inner"] = reader.size("intermediate_size", default=usual, derived=True)
        reader.irrelevant("expand", "intermediate_size, as it is written, says it")
        reader.defaults.pop("intermediate_size", None)

    def write(self, parts: Parts) -> dict[str, Any]:
        return {"intermediate_size": first(Mamba, "d_inner")(parts)}


class StepRank:
    """A key for the width of the vector that steps are computed from; `auto` is a sixteenth of the stream."""

    def __init__(self, key: str) -> None:
        self.key = key

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the width."""
        auto = math.ceil(values["d_model"] / 16)
        said = reader.config.get(self.key) if reader.given(self.key) else "auto"
        values["dt_rank"] = auto if said == "auto" else reader.size(self.key)

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the width."""
        return {self.key: first(Mamba, "dt_rank")(parts)}


def mixer(
    d_model: int,
    d_inner: int,
    d_state: int,
    dt_rank: int,
    kernel: int,
    conv_bias: bool,
    bias: bool,
    norm_eps: float | None = None,
    gain: Any = "none",  # noqa: ANN401
) -> Mamba:
    """Returns Mamba of these sizes; with a `norm_eps` steps, b and c are normed."""

    def norm(width: int) -> RMSNorm | None:
        return None if norm_eps is None else RMSNorm(d=width, eps=norm_eps, gain=gain)

    return Mamba(
        d_model=d_model,
        d_inner=d_inner,
        d_state=d_state,
        dt_rank=dt_rank,
        conv=ShortConvolution(channels=d_inner, kernel=kernel, bias=conv_bias),
        bias=bias,
        dt_norm=norm(dt_rank),
        b_norm=norm(d_state),
        c_norm=norm(d_state),
    )


def build(
    *,
    n_layers: int,
    n_vocab: int,
    eps: float,
    tied: bool,
    name: str = "model",
    **sizes: Any,  # noqa: ANN401
) -> LanguageModel:
    """Returns the model of these sizes."""
    return state_space.stack(mixer(**sizes), n_layers=n_layers, n_vocab=n_vocab, eps=eps, tied=tied, name=name)


# What the converter left of the original code's names, which say again what others do.
CONVERTED = (
    Only("d_model", lambda values: values["d_model"], reason="hidden_size says it"),
    Only("d_inner", lambda values: values["d_inner"], reason="intermediate_size says it"),
    Only("n_layer", lambda values: values["n_layers"], reason="num_hidden_layers says it"),
    Only("rms_norm", True, reason="norms of this family are RMSNorm"),
    Only("ssm_cfg", {}, None, reason="sizes of the mixer stand beside it"),
    Irrelevant("vocab_size, as it is written, is a multiple of it", "pad_vocab_size_multiple"),
)


def keys(n_vocab: int, d_model: int, n_layers: int, ties: bool) -> tuple[Key, ...]:
    """Returns the keys of the family and its kin, with these defaults."""
    return (
        *state_space.of_stack(n_vocab=n_vocab, d_model=d_model, n_layers=n_layers, ties=ties),
        _Inner(),
        Size("state_size", "d_state", default=16, at=first(Mamba, "d_state")),
        StepRank("time_step_rank"),
        Size("conv_kernel", "kernel", default=4, at=first(Mamba, "conv.kernel")),
        Flag("use_conv_bias", "conv_bias", default=True, at=first(Mamba, "conv.bias")),
        Flag("use_bias", "bias", default=False, at=first(Mamba, "bias")),
        Irrelevant("how it is computed, not what", "use_falcon_mambapy", "fused_add_norm"),
        *CONVERTED,
    )


FAMILY = Family(
    name="mamba",
    heads=("MambaForCausalLM",),
    keys=keys(n_vocab=50280, d_model=768, n_layers=32, ties=True),  # defaults as in transformers' MambaConfig
    build=build,
    names=state_space.names(state_space.OF_MAMBA),
    prefix="backbone.",
)
