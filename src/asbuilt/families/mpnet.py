"""The mpnet family: roberta with a bias of every distance's bucket in all layers, and without types of tokens.

Song et al. 2020 (arXiv 2004.09297); the buckets are T5's. all-mpnet-base-v2 is published under it. Positions count real
tokens from 2 on, whatever pad_token_id says.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from asbuilt.families import bert, roberta
from asbuilt.families.shared.key import Only, but

STEMS = {
    **{f"attention.body.{part}": f"attention.attn.{part}" for part in "qkvo"},
    "attention.sum_norm": "attention.LayerNorm",
    "ffn.body.up": "intermediate.dense",
    "ffn.body.down": "output.dense",
    "ffn.sum_norm": "output.LayerNorm",
}
N_BUCKETS = 32

FAMILY = replace(
    bert.FAMILY,
    name="mpnet",
    prefix="mpnet.",
    heads=("MPNetForMaskedLM",),
    ends=partial(roberta.ends, base="mpnet"),
    prepare=lambda config, name: config,
    keys=(  # defaults as in transformers' MPNetConfig
        *but(bert.keys(30527, roberta.Rows(fixed=1)), n_types=None),
        Only("relative_attention_num_buckets", N_BUCKETS, reason="transformers computes that many"),
    ),
    build=partial(bert.build, n_buckets=N_BUCKETS),
    names=partial(
        bert.names,
        base="mpnet",
        head=roberta.HEAD,
        decoder="lm_head.decoder",
        unused={r"mpnet\.pooler\..*": "this class has no pooler; early files hold one all the same"},
        stems=STEMS,
    ),
)
