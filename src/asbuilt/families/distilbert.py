"""The distilbert family: bert without types of tokens and without a pooler, under names of its own.

Sanh et al. 2019 (arXiv 1910.01108). The epsilon of all norms is 1e-12, which no key says.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from asbuilt.families import bert
from asbuilt.families.shared.ends import End
from asbuilt.families.shared.key import Irrelevant, Only, Size, activation, depth
from asbuilt.families.shared.sizes import DerivedHeadWidth

STEMS = {
    **{f"attention.body.{part}": f"attention.{part}_lin" for part in "qkv"},
    "attention.body.o": "attention.out_lin",
    "attention.sum_norm": "sa_layer_norm",
    "ffn.body.up": "ffn.lin1",
    "ffn.body.down": "ffn.lin2",
    "ffn.sum_norm": "output_layer_norm",
}
HEAD = {
    "head.transform.dense": "vocab_transform",
    "head.transform.norm": "vocab_layer_norm",
    "head": "vocab_projector",
}


def _ends(name: str) -> dict[str, End]:
    labels = End(
        labels="first",
        transform=bert.pooler("relu"),
        stems={"head": "classifier", "head.transform.dense": "pre_classifier"},
    )
    return {
        f"{name}Model": End(),
        f"{name}ForSequenceClassification": labels,
        f"{name}ForMultipleChoice": replace(labels, n_labels=1),
        **bert.token_ends(name, {}),
    }


FAMILY = replace(
    bert.FAMILY,
    name="distilbert",
    prefix="distilbert.",
    heads=("DistilBertForMaskedLM",),
    ends=_ends,
    prepare=lambda config, name: config,
    keys=(  # defaults as in transformers' DistilBertConfig
        *bert.MASKED,
        Size("dim", "d_model", default=768, also=("hidden_size",)),
        Size("n_heads", "n_heads", default=12, also=("num_attention_heads",)),
        DerivedHeadWidth(),
        Size("vocab_size", "n_vocab", default=30522),
        depth("n_layers", 6, "num_hidden_layers"),
        Size("hidden_dim", "d_ff", default=3072),
        Size("max_position_embeddings", "max_positions", default=512),
        activation("activation", "gelu", tanh="gelu_new"),
        Irrelevant("training only", "qa_dropout", "seq_classif_dropout"),
        Irrelevant("how the table of positions begins: it is stored", "sinusoidal_pos_embds"),
        Only("tie_weights_", True, reason="the head shares the embedding's table"),
    ),
    names=partial(
        bert.names,
        base="distilbert",
        head=HEAD,
        decoder="vocab_projector",
        unused={},
        stems=STEMS,
        layers="transformer.layer",
    ),
)
