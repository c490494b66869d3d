"""Every field of every part: what it is when it is not given, and that another type is refused by its name."""

from __future__ import annotations

import math
import sys
import types
import typing
from dataclasses import MISSING, fields, replace
from typing import Any

import pytest
import strategies
from hypothesis import given

from asbuilt import cost, spec
from asbuilt.catalog import find, names
from asbuilt.errors import InputError
from asbuilt.spec import DynamicNTK, LongRope, Model, Part, Pass, Predictor, Rotary, walk
from asbuilt.spec.part import runs

# What is not given; what is None or empty by default is left out. A spec that was saved without them means these.
DEFAULTS: dict[str, dict[str, Any]] = {
    "Alibi": {"bias_max": 8.0},
    "Attention": {"causal": True, "bias": False, "output_bias": False, "rotate_first": False, "sinks": False,
                  "cached": True},
    "Branch": {"scale": 1.0, "parallel": False},
    "Classifier": {"bias": True},
    "CrossAttention": {"bias": False, "output_bias": False},
    "ExpertGroups": {"score": "best"},
    "GatedMLP": {"bias": False},
    "Head": {"bias": False, "scale": 1.0, "shift": False},
    "HeadTransform": {"eps": 1e-12, "bias": True, "norm_bias": True},
    "LatentAttention": {"bias": False, "output_bias": False},
    "LayerNorm": {"eps": 1e-5, "gain": True, "bias": True},
    "LearnedPositions": {"offset": 0},
    "MLP": {"bias": False},
    "MLPProjector": {"bias": False, "merge": 1},
    "MixtureOfExperts": {"gating": "gated", "bias": False, "weighs": "results", "shared_gate": False},
    "Model": {"name": "model"},
    "PatchEmbedding": {"channels": 3, "bias": False, "class_token": "none"},
    "Projection": {"reads": "first"},
    "RMSNorm": {"eps": 1e-6, "gain": "weight"},
    "Rotary": {"theta": 10000.0, "pairing": "halves"},
    "Router": {"scoring": "softmax", "renormalise": False, "bias": False, "correction": False, "eps": 0.0,
               "scale": 1.0},
    "SharedEmbedding": {"scale": 1.0},
    "Sinusoids": {"theta": 10000.0, "layout": "halves"},
    "TiedHead": {"bias": False, "scale": 1.0, "shift": False},
    "TokenEmbedding": {"scale": 1.0},
    "Vision": {"keep_class": False, "both_ways": False},
    "YaRN": {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True},
}  # fmt: skip
KINDS = sorted((kind for kind in vars(spec).values() if isinstance(kind, type) and issubclass(kind, Part)),
               key=lambda kind: kind.__name__)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_is_not_given(kind: type[Part]) -> None:
    given = {f.name: f.default for f in fields(kind) if f.default is not MISSING and f.default not in (None, ())}
    assert given == DEFAULTS.get(kind.__name__, {})


def examples() -> dict[type[Part], Part]:
    """One part of each kind: those of the catalogue, and some that no model there has."""
    found: dict[type[Part], Part] = {}
    for name in names():
        for _, part in walk(find(name).spec()):
            found.setdefault(type(part), part)
        for predictor in find(name).spec().predictors:
            found.setdefault(Predictor, predictor)
    found[DynamicNTK] = DynamicNTK(factor=2.0, original_context=64)
    found[LongRope] = LongRope(
        short_factors=(1.0, 1.0), long_factors=(2.0, 3.0), original_context=64, attention_factor=1.0
    )
    return found


EXAMPLES = examples()


def of_another_type(hint: Any) -> tuple[object, ...]:  # noqa: ANN401  an annotation
    """What a field of that type must not be; nothing is tried of fields that hold parts."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        inner = [one for one in typing.get_args(hint) if one is not type(None)]
        return of_another_type(inner[0]) if len(inner) == 1 else ()
    if typing.get_origin(hint) is typing.Literal:
        return ("nonsense", 1)
    return {bool: ("yes", 1), int: (1.5, "3", True), float: (math.nan, "x", True)}.get(hint, ())


@pytest.mark.parametrize("kind", EXAMPLES, ids=lambda kind: kind.__name__)
def test_another_type_is_refused_by_name(kind: type[Part]) -> None:
    space = {**vars(typing), **vars(spec), **vars(sys.modules[kind.__module__]), "Model": Model}
    for field in fields(kind):
        for value in of_another_type(eval(str(field.type), space)):
            with pytest.raises(InputError, match=field.name):
                replace(EXAMPLES[kind], **{field.name: value})


def test_every_kind_of_part_is_tried() -> None:
    unseen = {kind.__name__ for kind in KINDS} - {kind.__name__ for kind in EXAMPLES}
    assert unseen <= {"Part", "FrequencyFactors"}


# What declarations call the tensors that are kept; a tensor that a whole stack shares is called after what made it.
KEPT = {
    "activated", "ahead", "before", "by distance", "capped", "chosen", "chosen scores", "dense", "distances", "dropped",
    "gate", "gate cut", "hidden", "input", "k", "latent", "logsumexp", "mask", "mean", "mixed", "mixed and zeros",
    "opened", "order", "places", "positions", "probabilities", "probabilities cast", "projected", "q", "q latent",
    "queries", "results", "rows", "rstd", "scale", "scores", "source", "sums", "tokens", "types", "up", "up cut", "v",
    "weights",
}  # fmt: skip


@pytest.mark.parametrize("name", names())
def test_what_products_and_kept_tensors_are_called(name: str) -> None:
    """A product with a weight is called as the weight is, but where what it makes says more."""
    makes = {"distances": "positions", "labels": "head", "logits": "head", "patches": "embedding", "projection": "head"}
    model = find(name).spec()
    for kernel in ("fused", "reference"):
        run = Pass(tokens=4, source=None if model.encoder is None else 3, kernel=kernel, width=2)  # type: ignore[arg-type]
        for _, part, seen in runs(model, run):
            for saved in part.saves(seen):
                assert saved.name in KEPT or any(mark in saved.name for mark in ("(", "sinusoids")), saved
        for product in cost.products(model, run):
            called, path = product.product.name, product.weight_path
            weight = "" if path is None else path.removesuffix(".weight").split(".")[-1]
            assert called in (weight, *(("scores", "mix", "by distance") if path is None else ())) or (
                makes.get(called) == weight or (called == "logits" and weight in ("embedding", "router"))
            ), product


@given(strategies.specs())
def test_no_two_kept_tensors_of_a_part_share_a_name(model: Model) -> None:
    for _, part, seen in runs(model, Pass(tokens=4, width=2)):
        called = [saved.name for saved in part.saves(seen)]
        assert len(called) == len(set(called)), called


def test_yarn_whose_ramp_begins_below_the_first_pair() -> None:
    """d = 8, 64 tokens: 32 turns are at pair -0.50, so at 0; one turn at 1.01, so at 2. Pair 1 is half way between."""
    scaling = spec.YaRN(factor=4.0, original_context=64)
    plain = [10000 ** (-2 * i / 8) for i in range(4)]
    wanted = [plain[0], plain[1] * (0.5 / 4 + 0.5), plain[2] / 4, plain[3] / 4]
    assert Rotary(d_rotary=8, scaling=scaling).inverse_frequencies() == pytest.approx(wanted)
