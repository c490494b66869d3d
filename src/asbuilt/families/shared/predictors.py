"""Multi-token prediction layers in configs and checkpoint folders: their number, and names.

Most are named as further blocks, after the last one; Qwen's have names of their own, which begin with `mtp`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from asbuilt.errors import InputError
from asbuilt.families.shared.key import DROPPED, Values
from asbuilt.families.shared.names import Names
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.families.shared.table import Entry, TensorTable, entry
from asbuilt.spec import LanguageModel, Model, stored_weights

KEY, OTHER = "num_nextn_predict_layers", "num_mtp_layers"
MOST = 16
# of a prediction layer, beside its block
NAMES = {
    "embedding": "embed_tokens",
    "token_norm": "enorm",
    "stream_norm": "hnorm",
    "join": "eh_proj",
    "norm": "shared_head.norm",
    "head": "shared_head.head",
}


class Count:
    """How many prediction layers are stored, one unless said; carried, since a folder may leave them out."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the number."""
        values["n_predictors"] = reader.size(KEY, OTHER, default=1, least=0, most=MOST)
        for key in (KEY, OTHER):
            reader.irrelevant(key, "the spec says it where they are stored")

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the number; of a model without them what was carried."""
        return {KEY: len([*parts.model.extras()]) or parts.carried.get(KEY, 0), OTHER: DROPPED}


class One:
    """Whether one prediction layer is stored, as it is unless said; it shares the model's embedding and head.

    Several would share one map and its norms, and a dedicated embedding has no published name: neither is built.
    """

    dedicated = "mtp_use_dedicated_embeddings"
    reason = "the spec says it where one is stored; several, or dedicated embeddings, are not built"

    def __init__(self, key: str, other: str) -> None:
        self.key, self.other = key, other

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the number."""
        count = reader.size(self.key, self.other, default=1, null=0, least=0, most=MOST)
        dedicated = reader.flag(self.dedicated, default=False, null=False)
        values["n_predictors"] = built = int(count == 1 and not dedicated)
        for key in (self.key, self.other, self.dedicated):
            if count and not built:
                reader.note(key, self.reason, "prediction layers are not built: only one is, that shares the embedding")
            else:
                reader.irrelevant(key, self.reason)

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the number; of a model without them what was carried."""
        return {self.key: len([*parts.model.extras()]) or parts.carried.get(self.key) or 0, self.other: DROPPED}


# of a prediction layer named `mtp`, beside its block
MTP = {
    "token_norm": "pre_fc_norm_embedding",
    "stream_norm": "pre_fc_norm_hidden",
    "join": "fc",
    "norm": "norm",
}
NOT_BUILT = {r"mtp\..*": "prediction layers, which are not built"}


def beside(names: Names) -> Callable[[Model, str], TensorTable]:
    """Returns what makes the table of a model whose one prediction layer is named `mtp`."""

    def table(spec: Model, family: str) -> TensorTable:
        found = names(spec, family)
        layers = list(spec.predictors) if isinstance(spec, LanguageModel) else []
        if not layers:
            return replace(found, ignored={**found.ignored, **NOT_BUILT})
        if len(layers) > 1:
            raise InputError(f"{family} files have one prediction layer", field="predictors", value=len(layers))
        entries = [*found.entries, *names.inside(layers[0].block, "predictors.0.block.", "mtp.layers.0.", family)]
        for path, _, _ in stored_weights(layers[0]):
            part, _, kind = path.rpartition(".")
            if part.startswith("block."):
                continue
            if part not in MTP:
                raise InputError(f"{family} files have no name for this weight", field=f"predictors.0.{path}")
            entries.append(entry(f"predictors.0.{path}", f"mtp.{MTP[part]}.{kind}"))
        return replace(found, entries=tuple(entries))

    return table


def named(names: Names, beside: Mapping[str, str] = NAMES) -> Callable[[Model, str], TensorTable]:
    """Returns what makes the table of a model with prediction layers, which are named as further blocks.

    `beside` names their parts beside the block.
    """

    def table(spec: Model, family: str) -> TensorTable:
        if not isinstance(spec, LanguageModel):
            return names(spec, family)
        after = tuple(predictor.block for predictor in spec.predictors)
        whole = names(replace(spec, blocks=(*spec.blocks, *after), predictors=()), family)
        entries = list(whole.entries)
        for i, predictor in enumerate(spec.predictors):
            layer = spec.n_layers + i
            entries = [_moved(one, f"blocks.{layer}.", f"predictors.{i}.block.") for one in entries]
            for part, name in beside.items():
                held = {"weight"} if part == "join" else getattr(predictor, part).local_weights()
                entries += [
                    entry(f"predictors.{i}.{part}.{kind}", f"model.layers.{layer}.{name}.{kind}") for kind in held
                ]
        return replace(whole, entries=tuple(entries))

    return table


def _moved(one: Entry, old: str, new: str) -> Entry:
    if not one.paths[0].startswith(old):
        return one
    return replace(one, paths=tuple(new + path.removeprefix(old) for path in one.paths))
