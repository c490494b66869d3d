"""A family as one value: what its configs say, key by key, how a spec is built of it, and what its tensors are called.

`read`, `write`, `table`, the refusal of unread keys and the check that a written config reads back as the same spec are
here, once for all families.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from asbuilt.families.shared.common import config_of, read_common, require_same
from asbuilt.families.shared.key import DROPPED, Key, Values, written
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader, Reading
from asbuilt.families.shared.table import TensorTable
from asbuilt.spec import Model


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Family:
    """One published `model_type`.

    `heads` are the class names of its language model, the usual one first. `build` takes what the `keys` read, by name.
    `names` makes the table of a checkpoint folder, `packed` those of folders whose weights are packed, by method;
    `prefix` is transformers' `base_model_prefix`. `prepare` is what a config goes through before it is read. What every
    config of the family may say of encoder and direction are `encoder_decoder` and `causal`.
    """

    name: str
    heads: tuple[str, ...]
    keys: tuple[Key, ...]
    build: Callable[..., Model]
    names: Callable[[Model, str], TensorTable]
    prefix: str = "model."
    packed: Mapping[str, Callable[[Model, str], TensorTable]] = field(default_factory=dict)
    prepare: Callable[[dict[str, Any], str], dict[str, Any]] = lambda config, name: config
    encoder_decoder: bool = False
    causal: bool = True

    def read(self, config: dict[str, Any], name: str, prefix: str = "") -> Reading:
        """Returns what a config.json says; `name` becomes the model's and stands in messages, before `prefix`.

        Raises InputError naming the key at fault.
        """
        reader = ConfigReader(self.prepare(config, name) if isinstance(config, dict) else config, name, prefix)
        dtype = read_common(reader, self.name, self.heads, encoder_decoder=self.encoder_decoder, causal=self.causal)
        values: Values = {"name": name}
        for key in self.keys:
            key.read(reader, values)
        reader.finish()
        return Reading(
            spec=self.build(**values),
            carried=reader.carried,
            dtype=dtype,
            family=self.name,
            defaults=reader.defaults,
            notes=reader.notes,
        )

    def write(self, spec: Model, carried: dict[str, Any], dtype: str | None) -> dict[str, Any]:
        """Returns a config.json that `read` reads back as `spec`; raises InputError naming what it cannot express.

        A config may declare predictors that the folder, and so the spec, lacks.
        """
        own = {"model_type": self.name, **written(self.keys, Parts(spec, self.name, carried))}
        if self.encoder_decoder:
            own["is_encoder_decoder"] = True
        if self.heads:
            own = {"architectures": [self.heads[0]]} | own
        config = {key: value for key, value in config_of(own, carried, dtype).items() if value is not DROPPED}
        again = self.read(config, spec.name).spec
        require_same(spec, again if [*spec.extras()] else again.without_extras, self.name)
        return config

    def table(self, spec: Model) -> TensorTable:
        """Returns the names and layouts of a checkpoint folder's tensors."""
        return self.names(spec, self.name)
