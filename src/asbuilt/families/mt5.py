"""The mt5 family: t5 as of version 1.1, gated, its head never scaled. Xue et al. 2021 (arXiv 2010.11934)."""

from __future__ import annotations

from typing import Any

from asbuilt.families import t5
from asbuilt.families.shared.common import config_of, read_common, require_same
from asbuilt.families.shared.reader import ConfigReader, Reading
from asbuilt.families.shared.table import Table
from asbuilt.spec import Model

FAMILY = "mt5"
PREFIX = "transformer."
HEADS = ("MT5ForConditionalGeneration",)
DEFAULTS: dict[str, Any] = {"vocab_size": 250112, "d_model": 512, "d_ff": 1024, "num_layers": 8, "num_heads": 6}


def read(config: dict[str, Any], name: str) -> Reading:
    """Returns what a config.json of this family says; class defaults are those of transformers' MT5Config.

    `name` becomes the model's name and stands in messages. Raises InputError naming the key at fault.
    """
    reader = ConfigReader(config, name)
    dtype = read_common(reader, FAMILY, HEADS, encoder_decoder=True)
    sizes = t5.read_sizes(reader, DEFAULTS)
    n_layers, n_decoder_layers = t5.read_layers(reader, DEFAULTS["num_layers"])
    gated, activation = t5.read_ffn(reader, "gated-gelu")
    tied = reader.flag("tie_word_embeddings", default=True)
    d_ff = reader.size("d_ff", default=DEFAULTS["d_ff"])
    reader.finish()
    spec = t5.build(
        sizes,
        d_ff=d_ff,
        n_layers=n_layers,
        n_decoder_layers=n_decoder_layers,
        activation=activation,
        gated=gated,
        tied=tied,
        scaled=False,
    )
    carried = {"decoder_start_token_id": 0} | reader.carried
    return Reading(spec=spec, carried=carried, dtype=dtype, family=FAMILY, defaults=reader.defaults, notes=reader.notes)


def write(spec: Model, carried: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Returns a config.json that `read` reads back as `spec`; raises InputError naming what it cannot express."""
    _, _, ffn = t5.stacks(spec, FAMILY)
    config = config_of(t5.write_sizes(spec, FAMILY, HEADS[0]) | t5.write_ffn(ffn.body, FAMILY), carried, dtype)
    require_same(spec, read(config, spec.name).spec, FAMILY)
    return config


def table(spec: Model) -> Table:
    """Returns the names and layouts of a checkpoint folder's tensors."""
    return t5.table_of(spec, FAMILY)
