"""A family as one value: what its configs say, key by key, how a spec is built of it, and what its tensors are called.

`read`, `write`, `table`, the refusal of unread keys and the check that a written config reads back as the same spec are
here, once for all families.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from asbuilt.errors import InputError
from asbuilt.families.shared.common import config_of, read_common, require_same
from asbuilt.families.shared.ends import (
    ASIDE,
    CLASSES,
    End,
    Ends,
    decoder_ends,
    left_out,
    trunk,
    written_trunk,
)
from asbuilt.families.shared.key import DROPPED, Key, Values, written
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import TIED, ConfigReader, Reading
from asbuilt.families.shared.table import TensorTable, as_stored
from asbuilt.spec import Model

# How the names of classes with a language model's head end.
LANGUAGE_HEADS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Family:
    """One published `model_type`.

    `heads` are the class names of its language model, the usual one first; `ends` makes what its other classes end in
    of what the name of the first begins with, and `padding` is the class's `pad_token_id`. `build` takes what the
    `keys` read, by name.
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
    ends: Ends = decoder_ends
    padding: int | None = None

    @cached_property
    def other_ends(self) -> Mapping[str, End]:
        """The classes without a language model's head, by name."""
        first = self.heads[0] if self.heads else ""
        name = next((first.removesuffix(end) for end in LANGUAGE_HEADS if first.endswith(end)), None)
        return {} if name is None else self.ends(name)

    def read(self, config: dict[str, Any], name: str, prefix: str = "") -> Reading:
        """Returns what a config.json says; `name` becomes the model's and stands in messages, before `prefix`.

        Raises InputError naming the key at fault.
        """
        reader = ConfigReader(self.prepare(config, name) if isinstance(config, dict) else config, name, prefix)
        classes = (*self.heads, *self.other_ends)
        dtype = read_common(reader, self.name, classes, encoder_decoder=self.encoder_decoder, causal=self.causal)
        end, given = self._end(reader.config.get(CLASSES)), reader.config
        if end is not None:  # what a head alone would read says nothing here
            reader.config = {key: value for key, value in given.items() if key not in ASIDE}
        values: Values = {"name": name}
        for key in self.keys:
            key.read(reader, values)
        spec, reader.config = self.build(**values), given
        if end is not None:
            whole, spec = spec, end.read(reader, spec, self.padding)
            reader.carried |= left_out(self.keys, spec, whole, self.name, reader.carried)
            reader.carried |= {key: given[key] for key in (CLASSES, TIED) if key in given}
            reader.defaults.pop(TIED, None)
        reader.finish()
        return Reading(
            spec=spec,
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
        end = self.end_of(spec, carried)
        if end is None:
            own = {"model_type": self.name, **written(self.keys, Parts(spec, self.name, carried))}
        else:
            own = {"model_type": self.name, **written_trunk(self.keys, spec, self.name, carried)}
            own |= self.other_ends[end].written(spec, carried)
        if self.encoder_decoder:
            own["is_encoder_decoder"] = True
        if self.heads:
            own = {CLASSES: [end or self.heads[0]]} | own
        config = {key: value for key, value in config_of(own, carried, dtype).items() if value is not DROPPED}
        again = self.read(config, spec.name).spec
        require_same(spec, again if [*spec.extras()] else again.without_extras, self.name)
        return config

    def table(self, spec: Model, names: Callable[[Model, str], TensorTable] | None = None) -> TensorTable:
        """Returns the names and layouts of a checkpoint folder's tensors, `names` its own where they are packed."""
        names, end = names or self.names, self.end_of(spec, {})
        if end is None:
            made = names(spec, self.name)
            hears = any(path.startswith("hearing.") for one in made.entries for path in one.paths)
            if spec.heard is not None and not hears:
                raise InputError(f"{self.name} files have no tower of sounds", field="hearing")
            return made
        return self.other_ends[end].table(names(trunk(spec), self.name), spec, self.prefix)

    def alone(self, reading: Reading, stored: Collection[str]) -> Reading:
        """Returns the reading of a trunk that was saved alone, with the config of a class that has a head.

        Of such a file no name begins as the names of a trunk inside another do, and it has none of the head's tensors.
        """
        found = next(((name, end) for name, end in self.other_ends.items() if end.labels is None), None)
        if found is None or reading.spec.head is None or any(name.startswith(self.prefix) for name in stored):
            return reading
        entries = as_stored(replace(self.table(reading.spec), prefix=self.prefix), stored).entries
        of_head = {name for entry in entries if entry.paths[0].startswith("head.") for name in entry.names}
        if not of_head or not of_head.isdisjoint(stored):
            return reading
        (name, end), whole, carried = found, reading.spec, reading.carried
        spec = end.as_stored(whole, stored)
        if whole.language_head is not None:
            carried = carried | left_out(self.keys, spec, whole, self.name, carried)
        note = "the files have no head: the model ends in the residual stream"
        return replace(reading, spec=spec, carried=carried | {CLASSES: [name]}, notes={**reading.notes, CLASSES: note})

    def _end(self, classes: object) -> End | None:
        """Returns the end that `architectures` names; None for a language model's head."""
        return self.other_ends.get(classes[0]) if isinstance(classes, list) and len(classes) == 1 else None

    def end_of(self, spec: Model, carried: Mapping[str, Any]) -> str | None:
        """Returns the class whose end a model has, the one that its config named if it may be; None for none."""
        if spec.language_head is not None:
            return None
        found = [name for name, end in self.other_ends.items() if end.fits(spec)]
        named = carried.get(CLASSES)
        return named[0] if isinstance(named, list) and named and named[0] in found else next(iter(found), None)
