"""The llama family: RMSNorm before each branch, grouped-query attention with RoPE, gated feed-forward.

Llama 1 to 3.3, SmolLM2, TinyLlama and others publish under `model_type: llama`. Touvron et al. 2023
(arXiv 2302.13971, 2307.09288); names on disk as on the hub. `build` makes the models of its kin too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, Literal, Unpack

from asbuilt.families.shared.dimensions import Sizes, residual, sized, with_predictors
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Irrelevant, Only, but
from asbuilt.families.shared.names import STEMS, Names
from asbuilt.families.shared.sizes import ATTENTION_BIAS, MLP_BIAS, RMS_EPS, sizes
from asbuilt.spec import Block, LanguageModel, Mixer, Norm, QueryTemperature, RMSNorm, Rotary, Router


def build(
    *,
    eps: float = 1e-5,
    norms: Callable[..., Norm] = RMSNorm,
    mixer: Mixer | None = None,
    bias: bool = False,
    output_bias: bool | None = None,
    head_norms: bool = False,
    whole_norms: bool = False,
    gating: Literal["channel", "head"] | None = None,
    window: int | None = None,
    windows: Sequence[int | None] = (),
    local: Rotary | None = None,
    rope_layers: Sequence[bool] = (),
    adjacent: bool = False,
    rotate_first: bool = False,
    temperature: QueryTemperature | None = None,
    score_scale: float | None = None,
    gated: bool = True,
    mlp_bias: bool = False,
    router: Router | None = None,
    d_expert: int | None = None,
    n_shared: int | None = None,
    d_shared: int | None = None,
    shared_gate: bool = False,
    n_dense: int = 0,
    dense: Collection[int] = (),
    norm_at: Literal["before", "after", "both"] = "before",
    parallel: bool = False,
    branch_scale: float = 1.0,
    embedding_scale: float = 1.0,
    logit_scale: float = 1.0,
    n_predictors: int = 0,
    **sizes: Unpack[Sizes],
) -> LanguageModel:
    """Returns the model of these sizes: blocks of attention and feed-forward, with norms before them, after, or both.

    q, k and v have a `bias`, and the output map too unless `output_bias` says otherwise; `head_norms` norm each head's
    queries and keys, `whole_norms` those of all heads together, after RoPE with `rotate_first`; `gating` gates what
    attention gives. `windows` and `rope_layers` say for each layer how far it sees and whether it has RoPE, which is
    `local` in those with a window, and pairs numbers that are `adjacent` or of either half of a head; a `mixer` stands
    in place of attention. With a `router` the feed-forward is a mixture of experts, `d_expert` wide, beside `n_shared`
    shared ones or one `d_shared` wide, in all layers but the first `n_dense` and those in `dense`.
    """
    made = sized(sizes)
    norm, normed = norms(d=made.d_model, eps=eps), (1, 1) if head_norms else (made.n_heads, made.n_kv_heads)
    q_norm, k_norm = (norms(d=n * made.head_width, eps=eps) if head_norms or whole_norms else None for n in normed)
    ffn = made.gated(mlp_bias) if gated else made.plain(mlp_bias)
    experts = ffn if router is None else made.mixture(router, d_expert, n_shared, d_shared, shared_gate)
    alike: dict[str, Any] = {"bias": bias, "output_bias": bias if output_bias is None else output_bias}
    alike |= {"q_norm": q_norm, "k_norm": k_norm, "scale": score_scale}
    alike |= {"temperature": temperature, "adjacent": adjacent, "rotate_first": rotate_first, "gating": gating}
    before, after = (norm if norm_at in (place, "both") else None for place in ("before", "after"))

    def block(window: int | None, rope: bool, sparse: bool) -> Block:
        turned = made if window is None or local is None else replace(made, rotary=local)
        own = mixer or turned.attention(rope=rope, window=window, **alike)
        return residual(own, experts if sparse else ffn, before, after, branch_scale, parallel=parallel)

    n_layers = range(made.n_layers)
    layers = list(
        zip(
            windows or [window for _ in n_layers],
            rope_layers or [True for _ in n_layers],
            [i >= n_dense and i not in dense for i in n_layers],
            strict=True,
        )
    )
    kinds = {layer: block(*layer) for layer in set(layers)}
    blocks = tuple(kinds[layer] for layer in layers)
    spec = made.model(blocks, norm, embedding_scale=embedding_scale, logit_scale=logit_scale)
    return with_predictors(spec, blocks[-1], norm, n_predictors) if n_predictors else spec


FAMILY = Family(
    name="llama",
    heads=("LlamaForCausalLM", "LLaMAForCausalLM"),  # the second in the earliest conversions
    keys=(  # defaults as in transformers' LlamaConfig
        *but(
            sizes(n_vocab=32000, d_model=4096, d_ff=11008, n_layers=32, n_heads=32, context=2048),
            max_positions={"also": ("max_sequence_length",)},
        ),
        RMS_EPS,
        ATTENTION_BIAS,
        MLP_BIAS,
        Irrelevant("a note of the converter's", "is_llama_config"),
        Only("activation", "swiglu", reason="hidden_act says it, and the feed-forward part is gated"),
        Only("qk_layernorm", False, reason="queries and keys are not normed in this family"),
        Only("use_qk_norm", False, reason="queries and keys are not normed in this family"),
        Only("rope_interleaved", False, None, reason="RoPE pairs a head's halves in this family"),
    ),
    build=build,
    names=Names(stems=STEMS),
)
