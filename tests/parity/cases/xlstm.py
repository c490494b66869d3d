"""xlstm: gates capped narrowly, a large epsilon beside the normaliser, keys and values of other widths than the stream.

transformers makes its cache for keys that are a multiple of 64 wide, which these are not: its passes are whole ones,
in chunks of a few tokens, and one by one what they leave.
"""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

import torch
from harness import Draw, Inputs, Kind, ParityCase, Trace
from transformers import PreTrainedConfig, PreTrainedModel, xLSTMConfig


class OfStack(Kind):
    """A stack whose blocks return their states too."""

    @torch.inference_mode()
    def theirs(self, model: PreTrainedModel, inputs: Inputs) -> Trace:
        """Returns the stream before the blocks, after each but the last, that one normed, and logits."""
        trunk: Any = model.get_submodule("backbone")
        named = {"embedding": trunk.embeddings, "norm": trunk.out_norm}
        named |= {f"blocks.{i}": block for i, block in enumerate(trunk.blocks[:-1])}
        found: Trace = {}

        def keep(path: str, result: Any) -> None:  # noqa: ANN401
            found[path] = result[0] if isinstance(result, tuple) else result

        hooks = [m.register_forward_hook(lambda _, __, made, at=path: keep(at, made)) for path, m in named.items()]
        out: Any = model(**inputs, use_cache=False)
        for hook in hooks:
            hook.remove()
        return found | {"head": out.logits}


def draw(rng: Random, **more: object) -> PreTrainedConfig:
    """A config of the class; `more` overrides."""
    heads = rng.choice([2, 3])
    d_model = heads * rng.choice([8, 10])
    sizes: dict[str, Any] = {
        "vocab_size": rng.randrange(60, 100),
        "hidden_size": d_model,
        "num_hidden_layers": 2,
        "num_heads": heads,
        "qk_dim_factor": heads * rng.choice([3, 5]) / d_model + 1e-6,
        "v_dim_factor": heads * rng.choice([6, 11]) / d_model + 1e-6,
        "ffn_proj_factor": rng.uniform(1, 2),
        "ffn_round_up_to_multiple_of": rng.choice([1, 4]),
        "norm_eps": rng.uniform(0.05, 0.2),
        "eps": rng.uniform(0.05, 0.2),
        "gate_soft_cap": rng.uniform(1, 3),
        "output_logit_soft_cap": rng.uniform(1, 3),
        "chunk_size": 4,
        "use_cache": False,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        **more,
    }
    return xLSTMConfig(**sizes)


CONFIGS: dict[str, Draw] = {
    "narrow": draw,
    "wide": partial(draw, gate_soft_cap=15.0, output_logit_soft_cap=30.0),
}

CASE = ParityCase(family="xlstm", configs=CONFIGS, kind=OfStack(), attentions=("eager",), caches=False)
