"""What a model ends in where its class has no language model's head: labels, or the residual stream alone.

transformers puts the same few ends on every trunk: `XModel` is the trunk alone, `XForSequenceClassification` labels a
text (a reward model or reranker with one label), `XForTokenClassification` every token, `XForQuestionAnswering` where
an answer begins and ends. `architectures` of a config says which. A family's `Ends` maps those classes to an `End`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from asbuilt.errors import InputError
from asbuilt.families.shared.key import Choice, Key
from asbuilt.families.shared.labels import read_labels, written_labels
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import TIED, ConfigReader, is_whole
from asbuilt.families.shared.table import TensorTable, entry, respelled
from asbuilt.spec import Classifier, Head, HeadTransform, Labelled, Model, Pooler, stored_weights

PADDING, ADDS_POOLER, CLASSES = "pad_token_id", "add_pooling_layer", "architectures"
# Keys that no end but the language model's head has a use for, or that an end reads by itself.
ASIDE = (TIED, ADDS_POOLER)
# Stems of stored names that are no part of a trunk.
OTHER_HEADS = r"(lm_head|cls|head|decoder|score|classifier|pre_classifier|qa_outputs|.*_predictions)\..*"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class End:
    """One end of a family's trunk; `stems` are the stored names of what is beyond the trunk, by path.

    It `labels` as a `Classifier` does, or as the key `choose` says, None for the trunk alone; x passes through what
    `transform` makes of the model with a language model's head. `n_labels` None is what the config says. `pools` says
    that the trunk alone has a pooler unless `add_pooling_layer` is false. `prefix` is what names begin with instead of
    the family's own; what is `unused` of a file is ignored.
    """

    stems: Mapping[str, str] = field(default_factory=dict)
    labels: Labelled | None = None
    bias: bool = True
    n_labels: int | None = None
    transform: Callable[[Model], Pooler | HeadTransform | None] = lambda spec: None
    choose: Choice | None = None
    pools: bool = False
    prefix: str = ""
    unused: Mapping[str, str] = field(default_factory=dict)

    def read(self, reader: ConfigReader, spec: Model, padding: int | None) -> Model:
        """Returns the model with this end in place of its head; `padding` is the class's `pad_token_id`."""
        adds = reader.config.get(ADDS_POOLER, self.pools)
        reader.require(ADDS_POOLER, adds in ((True, False) if self.pools else (False,)), "true or false, for a pooler")
        reader.known.update(ASIDE)
        if self.labels is None:
            return trunk(spec, Pooler(d_model=spec.d_model) if adds else None)
        labels = self.labels
        if self.choose is not None:
            self.choose.read(reader, own := {})
            labels = own[self.choose.into]
        n_labels = self.n_labels or read_labels(reader)
        reader.require("num_labels", labels != "span" or n_labels == 2, "two: where an answer begins, and ends")
        return trunk(spec).changed(
            head=Classifier(
                d_model=spec.d_model,
                n_labels=n_labels,
                bias=self.bias,
                labels=labels,
                padding=read_padding(reader, padding) if labels == "last" else None,
                transform=self.transform(spec),
            )
        )

    def as_stored(self, spec: Model, stored: Collection[str]) -> Model:
        """Returns the trunk of the model alone, with a pooler where it may have one and the file has it."""
        pooled = self.pools and "pooler.dense.weight" in stored
        return trunk(spec, Pooler(d_model=spec.d_model) if pooled else None)

    def fits(self, spec: Model) -> bool:
        """Returns whether a model ends so."""
        head, pooled = spec.head, getattr(spec, "pooler", None) is not None
        stored = {stem for _, (stem, _) in beyond(spec)}
        if self.labels is None or not isinstance(head, Classifier):
            return self.labels is head is None and stored <= {*self.stems} and (not pooled or self.pools)
        may = {self.labels} if self.choose is None else {*self.choose.choices.values()}
        fits = head.bias == self.bias and self.n_labels in (None, head.n_labels) and head.labels in may
        return fits and not pooled and stored == {*self.stems}

    def written(self, spec: Model, carried: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the keys that say how the model ends, beside its class."""
        head = spec.head
        if not isinstance(head, Classifier):
            return {ADDS_POOLER: False} if self.pools and getattr(spec, "pooler", None) is None else {}
        said = written_labels(head.n_labels, carried) if self.n_labels is None else {}
        if head.labels == "last" and not (head.padding is None and _no_token(carried.get(PADDING))):
            said[PADDING] = head.padding
        return said if self.choose is None else said | self.choose.write(Parts(spec, "", carried))

    def table(self, names: TensorTable, spec: Model, prefix: str) -> TensorTable:
        """Returns the table of the model, of the `names` of its trunk, which begin with `prefix`."""
        entries = [*names.entries, *(entry(path, f"{self.stems[stem]}.{kind}") for path, (stem, kind) in beyond(spec))]
        aside = {OTHER_HEADS: "a head, which the model without one leaves aside"} if self.labels is None else {}
        begins = ((prefix, self.prefix),) if self.labels is None or self.prefix else ()
        return replace(
            names, entries=respelled(entries, begins), ignored={**names.ignored, **self.unused, **aside}, duplicates={}
        )


Ends = Callable[[str], Mapping[str, End]]


def beyond(spec: Model) -> list[tuple[str, tuple[str, str]]]:
    """Returns (path, (stem, kind)) of every weight of the head and the pooler."""
    paths = [path for path, _, _ in stored_weights(spec) if path.startswith(("head.", "pooler."))]
    return [(path, (path.rpartition(".")[0], path.rpartition(".")[2])) for path in paths]


def trunk(spec: Model, pooler: Pooler | None = None) -> Model:
    """Returns the model without a head and predictors, and with this pooler."""
    return spec.without_extras.changed(head=None, pooler=pooler)


def headed(spec: Model) -> Model:
    """Returns the model with a plain language model's head, to write what a config says of all but the head.

    It keeps the transform that a classifier shares with it.
    """
    transform = getattr(spec.head, "transform", None)
    kept = transform if isinstance(transform, HeadTransform) else None
    return trunk(spec).changed(head=Head(d_model=spec.d_model, n_vocab=spec.n_vocab, transform=kept))


def written_trunk(keys: tuple[Key, ...], spec: Model, family: str, carried: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the keys write of a model without a language model's head, but for those that ask for one."""
    found: dict[str, Any] = {}
    for key in keys:
        said, asks = _said(key, Parts(headed(spec), family, carried))
        found |= {} if asks else said
    return found


def left_out(
    keys: tuple[Key, ...], spec: Model, with_head: Model, family: str, carried: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns what `written_trunk` leaves out, as it is with the head: a config without it carries that."""
    found: dict[str, Any] = {}
    for key in keys:
        if _said(key, Parts(headed(spec), family, carried))[1]:
            found |= key.write(Parts(with_head, family, carried))
    return found


def _said(key: Key, parts: Parts) -> tuple[dict[str, Any], bool]:
    """Returns what a key writes, and whether it asks for the head, of which it may need more than there is."""
    try:
        said = key.write(parts)
    except InputError:
        if not parts.asks_head:
            raise
        said = {}
    return said, parts.asks_head


def _no_token(padding: object) -> bool:
    return is_whole(padding) and isinstance(padding, int) and padding < 0


def read_padding(reader: ConfigReader, default: int | None) -> int | None:
    """Returns the token that is never a text's last one; None for null, and for a number that is no token's."""
    said = reader.config.get(PADDING, default)
    reader.require(PADDING, said is None or is_whole(said), "a token id, or null")
    return None if said is None or said < 0 else said


# Whose labels of tokens are stored as a classifier; all others have a score.
_CLASSIFIERS = frozenset(("GPT2", "GPTBigCode", "GPTNeo", "GPTNeoX", "Bloom", "Falcon", "Mpt"))
# Whose trunk has another name in the class that answers questions.
_OTHER_TRUNK = """
    Arcee DiffLlama Exaone4 GPTJ Llama Ministral Nemotron Qwen2 Qwen3 Qwen3Moe Qwen3Next SeedOss SmolLM3
"""


def decoder_ends(name: str) -> dict[str, End]:
    """Returns the ends of a decoder whose classes begin with `name`; a text is labelled at its last token."""
    tokens = "classifier" if name in _CLASSIFIERS else "score"
    questions = "transformer." if name in _OTHER_TRUNK.split() else ""
    return {
        f"{name}Model": End(),
        f"{name}ForSequenceClassification": End(stems={"head": "score"}, labels="last", bias=False),
        f"{name}ForTokenClassification": End(stems={"head": tokens}, labels="all"),
        f"{name}ForQuestionAnswering": End(stems={"head": "qa_outputs"}, labels="span", prefix=questions),
    }


def without_ends(name: str) -> dict[str, End]:
    """Returns none."""
    return {}
