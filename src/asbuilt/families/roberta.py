"""The roberta family: bert whose positions start after the padding token's number, and a head of other names.

Liu et al. 2019 (arXiv 1907.11692). Positions count real tokens from pad_token_id + 1 on; the head's activation is
GELU whatever hidden_act says.
"""

from __future__ import annotations

from typing import Any

from asbuilt.families import bert
from asbuilt.families.shared.common import config_of, require_same
from asbuilt.families.shared.reader import ConfigReader, Reading
from asbuilt.families.shared.table import Table
from asbuilt.spec import LearnedPositions, Model

FAMILY = "roberta"
PREFIX = "roberta."
HEADS = ("RobertaForMaskedLM", "RobertaModel")
DEFAULTS: dict[str, Any] = {"vocab_size": 50265, "max_position_embeddings": 512}
HEAD = {"head.transform.dense": "lm_head.dense", "head.transform.norm": "lm_head.layer_norm", "head": "lm_head"}
UNUSED = {r"roberta\.pooler\..*": "RobertaForMaskedLM has no pooler; early files hold one all the same"}


def read(config: dict[str, Any], name: str) -> Reading:
    """Returns what a config.json of this family says; class defaults are those of transformers' RobertaConfig.

    `name` becomes the model's name and stands in messages. Raises InputError naming the key at fault.
    """
    reader = ConfigReader(config, name)
    dtype, sizes = bert.read_sizes(reader, FAMILY, HEADS, DEFAULTS)
    rows = sizes.pop("rows")
    padding = reader.size("pad_token_id", default=1, least=0, most=sizes["n_vocab"] - 1)
    reader.finish()
    reader.require("pad_token_id", padding + 1 < rows, f"less than max_position_embeddings - 1 = {rows - 1}")
    sizes |= {"n_positions": rows - padding - 1, "offset": padding + 1, "head_activation": "gelu"}
    return Reading(
        spec=bert.build(name=name, **sizes),
        carried=reader.carried,
        dtype=dtype,
        family=FAMILY,
        defaults=reader.defaults,
        notes=reader.notes,
    )


def write(spec: Model, carried: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Returns a config.json that `read` reads back as `spec`; raises InputError naming what it cannot express."""
    written = bert.write_sizes(spec, FAMILY, HEADS)
    offset = spec.positions.offset if isinstance(spec.positions, LearnedPositions) else 0
    config = config_of(written | {"pad_token_id": max(offset - 1, 0)}, carried, dtype)
    require_same(spec, read(config, spec.name).spec, FAMILY)
    return config


def table(spec: Model) -> Table:
    """Returns the names and layouts of a checkpoint folder's tensors."""
    return bert.table_of(spec, FAMILY, HEAD, "lm_head.decoder", UNUSED)
