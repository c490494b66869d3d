"""The roberta family: bert with positions from pad_token_id + 1 on, and other names for the head.

Liu et al. 2019 (arXiv 1907.11692). Positions count real tokens from pad_token_id + 1 on; the head's activation is
GELU whatever hidden_act says.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from asbuilt.families import bert
from asbuilt.families.shared.ends import End
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Size, Values
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader

HEAD = {"head.transform.dense": "lm_head.dense", "head.transform.norm": "lm_head.layer_norm", "head": "lm_head"}
UNUSED = {r"roberta\.pooler\..*": "this class has no pooler; early files hold one all the same"}


class Rows:
    """How many rows the table of positions has, and after which, the padding token's, position 0 is found.

    That row is `pad_token_id` unless it is `fixed`.
    """

    rows = Size("max_position_embeddings", "rows", default=512)
    padding = Size("pad_token_id", "padding", default=1, least=0, most=lambda values: values["n_vocab"] - 1)

    def __init__(self, fixed: int | None = None) -> None:
        self.fixed = fixed

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads both; raises InputError where no rows are left for positions."""
        self.rows.read(reader, values)
        rows, padding = values.pop("rows"), self.fixed
        if padding is None:
            self.padding.read(reader, values)
            padding = values.pop("padding")
            reader.require(self.padding.key, padding + 1 < rows, f"less than {self.rows.key} - 1 = {rows - 1}")
        reader.require(self.rows.key, padding + 1 < rows, f"more than {padding + 1}")
        values |= {"max_positions": rows - padding - 1, "offset": padding + 1, "head_activation": "gelu"}

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns both."""
        table = bert.positions_of(parts)
        rows = {self.rows.key: table.n_positions + table.offset}
        return rows if self.fixed is not None else rows | {self.padding.key: max(table.offset - 1, 0)}


def ends(name: str, base: str = "roberta") -> dict[str, End]:
    """Returns the ends of roberta and its kin; `base` begins the names of the trunk."""
    unused = {rf"{base}\.pooler\..*": "this class has no pooler; early files hold one all the same"}
    return {
        f"{name}Model": End(pools=True, stems={"pooler.dense": f"{base}.pooler.dense"}),
        f"{name}ForSequenceClassification": End(
            labels="first",
            transform=bert.pooler("tanh"),
            stems={"head": "classifier.out_proj", "head.transform.dense": "classifier.dense"},
            unused=unused,
        ),
        **bert.token_ends(name, unused),
    }


def family(name: str, classes: str, n_vocab: int) -> Family:
    """Returns the family of this name; what its `classes` begin with, and the vocabulary of its config's class."""
    return replace(
        bert.FAMILY,
        name=name,
        prefix="roberta.",
        heads=(f"{classes}ForMaskedLM",),
        ends=ends,
        prepare=lambda config, name: config,
        keys=bert.keys(n_vocab, Rows()),
        names=partial(bert.names, base="roberta", head=HEAD, decoder="lm_head.decoder", unused=UNUSED),
    )


FAMILY = family("roberta", "Roberta", 50265)  # defaults as in transformers' RobertaConfig
