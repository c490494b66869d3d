"""The mamba2 family: Mamba-2 alone in every layer. Dao & Gu 2024 (arXiv 2405.21060).

transformers' class limits steps by `time_step_limit` where it reads a prompt, and not where it decodes; this does so
always, as the published code. No published model has limits.
"""

from __future__ import annotations

from typing import Any

from asbuilt.families.shared import state_space
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.hybrid import first
from asbuilt.families.shared.key import Check, Flag, Irrelevant, Only, Size
from asbuilt.families.shared.parts import Parts
from asbuilt.spec import LanguageModel, Mamba2


def build(
    *,
    n_layers: int,
    n_vocab: int,
    eps: float,
    tied: bool,
    bias: bool,
    expand: int,
    name: str = "model",
    **sizes: Any,  # noqa: ANN401
) -> LanguageModel:
    """Returns the model of these sizes."""
    mixer = state_space.mamba2(**sizes, bias=bias, output_bias=bias, eps=eps)
    return state_space.stack(mixer, n_layers=n_layers, n_vocab=n_vocab, eps=eps, tied=tied, name=name)


def _expand(parts: Parts) -> int:
    return first(Mamba2, "d_inner")(parts) // parts.d_model


FAMILY = Family(
    name="mamba2",
    heads=("Mamba2ForCausalLM",),
    keys=(  # defaults as in transformers' Mamba2Config
        *state_space.of_stack(n_vocab=32768, d_model=4096, n_layers=64, ties=False),
        Size("num_heads", "n_heads", default=128, at=first(Mamba2, "n_heads")),
        Size("head_dim", "d_head", default=64, at=first(Mamba2, "d_head")),
        Size("state_size", "d_state", default=128, at=first(Mamba2, "d_state")),
        Size("n_groups", "n_groups", default=8, divides="n_heads", at=first(Mamba2, "n_groups")),
        Size("conv_kernel", "kernel", default=4, at=first(Mamba2, "conv.kernel")),
        Size("expand", "expand", default=2, at=_expand),
        Check(
            "expand",
            (
                lambda values: values["expand"] * values["d_model"] == values["n_heads"] * values["d_head"],
                "num_heads * head_dim / hidden_size",
            ),
        ),
        Flag("use_conv_bias", "conv_bias", default=True, at=first(Mamba2, "conv.bias")),
        Flag("use_bias", "bias", default=False, at=first(Mamba2, "bias")),
        state_space.StepLimits(),
        Irrelevant("steps are one for each head", "time_step_rank"),
        Only(
            "intermediate_size",
            lambda values: values["n_heads"] * values["d_head"],
            reason="num_heads * head_dim says it",
        ),
        Only("rms_norm", True, reason="the mixer's output is normed by RMSNorm"),
        Irrelevant("transformers norms what was gated, whatever it says", "norm_before_gate"),
    ),
    build=build,
    names=state_space.names(state_space.OF_MAMBA2),
    prefix="backbone.",
)
