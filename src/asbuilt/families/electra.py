"""The electra family: bert whose embeddings have their own width, mapped to the stream's after their norm.

Clark et al. 2020 (arXiv 2003.10555). The generator is ElectraForMaskedLM, whose head maps back to the width of the
embeddings; the discriminator is ElectraForPreTraining, with one number for each token: whether it was replaced.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from asbuilt.families import bert
from asbuilt.families.shared.ends import End
from asbuilt.families.shared.key import Irrelevant, Key, Only, Size, but
from asbuilt.spec import MLP, Model, Pooler

OUTSIDE = {
    "embedding_projection.dense": "electra.embeddings_project",
    "head.transform.dense": "generator_predictions.dense",
    "head.transform.norm": "generator_predictions.LayerNorm",
    "head": "generator_lm_head",
}
DISCRIMINATOR = {r"discriminator_predictions\..*": "the discriminator's head, which the other classes lack"}
GENERATOR = {r"generator_(predictions|lm_head)\..*": "the generator's head, which the other classes lack"}
UNUSED = DISCRIMINATOR | GENERATOR
POSITIONS = Size(
    "max_position_embeddings",
    "max_positions",
    default=512,
    at=lambda parts: bert.positions_of(parts).n_positions,
)
D_EMBEDDING = Size("embedding_size", "d_embedding", default=128, at=lambda parts: parts.embedding.d_model)
# How ElectraForMultipleChoice summarises a text; the other classes do not read them.
SUMMARY: tuple[Key, ...] = (
    Only("summary_type", "first", reason="only the first token is read of a text"),
    Only("summary_use_proj", True, reason="only a summary with a map is read"),
    Only("summary_activation", "gelu", reason="only a summary after gelu is read"),
    Irrelevant("training only", "summary_last_dropout", "summary_first_dropout"),
)


def discriminating(spec: Model) -> Pooler:
    """Returns what every token passes through before it is labelled, with the activation of the blocks."""
    body = spec.blocks[0].branches[-1].body
    assert isinstance(body, MLP)
    assert isinstance(body.activation, str)
    return Pooler(d_model=spec.d_model, activation=body.activation)


def _ends(name: str) -> dict[str, End]:
    """Returns the ends, the discriminator's first."""
    labels = End(labels="first", transform=bert.pooler("gelu"), unused=UNUSED)
    texts = {"head": "classifier.out_proj", "head.transform.dense": "classifier.dense"}
    choices = {"head": "classifier", "head.transform.dense": "sequence_summary.summary"}
    replaced = {
        "head": "discriminator_predictions.dense_prediction",
        "head.transform.dense": "discriminator_predictions.dense",
    }
    return {
        f"{name}ForPreTraining": End(
            labels="all", n_labels=1, transform=discriminating, stems=replaced, unused=GENERATOR
        ),
        f"{name}Model": End(unused=UNUSED),
        f"{name}ForSequenceClassification": replace(labels, stems=texts),
        f"{name}ForMultipleChoice": replace(labels, stems=choices, n_labels=1),
        **bert.token_ends(name, UNUSED),
    }


FAMILY = replace(
    bert.FAMILY,
    name="electra",
    prefix="electra.",
    heads=("ElectraForMaskedLM",),
    ends=_ends,
    prepare=lambda config, name: config,
    keys=(  # defaults as in transformers' ElectraConfig
        *but(
            bert.keys(30522, POSITIONS),
            d_model={"default": 256},
            n_heads={"default": 4},
            d_ff={"default": 1024},
        ),
        D_EMBEDDING,
        *SUMMARY,
    ),
    build=partial(bert.build, head_activation="gelu"),
    names=partial(bert.names, base="electra", head=OUTSIDE, decoder="generator_lm_head", unused=DISCRIMINATOR),
)
