"""Multi-token prediction layers in configs and checkpoint folders: their number, and names after the last block's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from asbuilt.families.shared.key import DROPPED, Values
from asbuilt.families.shared.names import Names
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.families.shared.table import Entry, TensorTable, entry
from asbuilt.spec import LanguageModel, Model

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


def named(names: Names) -> Callable[[Model, str], TensorTable]:
    """Returns what makes the table of a model with prediction layers, which are named as further blocks."""

    def table(spec: Model, family: str) -> TensorTable:
        if not isinstance(spec, LanguageModel):
            return names(spec, family)
        after = tuple(predictor.block for predictor in spec.predictors)
        whole = names(replace(spec, blocks=(*spec.blocks, *after), predictors=()), family)
        entries = list(whole.entries)
        for i, predictor in enumerate(spec.predictors):
            layer = spec.n_layers + i
            entries = [_moved(one, f"blocks.{layer}.", f"predictors.{i}.block.") for one in entries]
            for part, name in NAMES.items():
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
