"""Names of the tensors in a checkpoint folder: stems of paths to stems of names, and what is stored as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from asbuilt.errors import InputError
from asbuilt.families.shared.table import Concat, Entry, Interleave, Layout, StackExperts, TensorTable, entry
from asbuilt.spec import Attention, Block, MixtureOfExperts, Model, Parallel, Part, TiedHead, stored_weights

NO_BUFFERS = {r"(.*\.)?rotary_emb\.inv_freq": "rotary frequencies, computed from the config"}
OUTSIDE = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}

ATTENTION = {f"attention.body.{part}": f"self_attn.{part}_proj" for part in "qkvo"}
GATED = {f"ffn.body.{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
NORMS = {"attention.norm": "input_layernorm", "ffn.norm": "post_attention_layernorm"}
POST_NORMS = {"attention.post_norm": "post_attention_layernorm", "ffn.post_norm": "post_feedforward_layernorm"}
QK_NORMS = {f"attention.body.{part}_norm": f"self_attn.{part}_norm" for part in "qk"}
STEMS = NORMS | ATTENTION | GATED
# of blocks whose q, k and v are stored as one
FUSED_STEMS = NORMS | {
    "attention.body.o": "self_attention.dense",
    "ffn.body.up": "mlp.dense_h_to_4h",
    "ffn.body.down": "mlp.dense_4h_to_h",
}
ROUTER = {"ffn.body.router": "mlp.gate"}
CORRECTED_ROUTER = ROUTER | {"ffn.body.router.correction": "mlp.gate.e_score_correction_bias"}
EXPERTS = {part: f"mlp.experts.{{}}.{part}_proj.weight" for part in ("gate", "up", "down")}
SHARED_EXPERTS = {f"ffn.body.shared.{part}": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
SHARED_EXPERT = {f"ffn.body.shared.{part}": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")}


def in_parallel(stems: Mapping[str, str]) -> dict[str, str]:
    """Returns the stems of attention and feed-forward as they are in a block's one branch named `parallel`."""
    return {f"parallel.body.{path.replace('.body.', '.')}": name for path, name in stems.items()}


# From a block and the rows of the tensors that are stored as one to the way in which they are.
Join = Callable[[Block, tuple[int, ...]], Layout]


def one_after_the_other(block: Block, rows: tuple[int, ...]) -> Layout:
    """Returns the layout of tensors whose rows follow each other."""
    return Concat(rows)


def by_key_head(block: Block, rows: tuple[int, ...]) -> Layout:
    """Returns the layout of q, k, v stored by key head: its queries, its key, its value, then the next one's."""
    bodies = [branch.body for branch in block.branches]
    found = [body.attention if isinstance(body, Parallel) else body for body in bodies]
    attention = next(body for body in found if isinstance(body, Attention))
    d_head, groups = attention.d_head, attention.n_kv_heads
    return Interleave(groups, (attention.n_heads // groups * d_head, d_head, d_head))


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Fused:
    """Tensors at `stems`, stored as one, `join` tells how."""

    stems: tuple[str, ...]
    join: Join = one_after_the_other

    @classmethod
    def qkv(cls, join: Join = one_after_the_other, at: str = "attention.body") -> Fused:
        """Returns the q, k and v weights of the attention at the path `at` of the block."""
        return cls(stems=tuple(f"{at}.{part}" for part in "qkv"), join=join)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Names:
    """The names of a family's tensors: `stems` of a block, whose number follows `layers`, and those `outside`.

    A weight is named by its stem, `stem.weight`, or as a whole. What is `fused` has its name first; `experts` are
    patterns for a mixture's own matrices, with `{}` for the number of an expert, or `stacked` gives their entries where
    a file has them in stacks; `rows` are patterns for tensors whose rows are stored one by one; `layouts` are those of
    what is not stored as built. Stems `elsewhere` have entries of their own. A tied head may be stored again.
    """

    stems: Mapping[str, str]
    outside: Mapping[str, str] = field(default_factory=lambda: OUTSIDE)
    layers: str = "model.layers"
    fused: Mapping[str, Fused] = field(default_factory=dict)
    experts: Mapping[str, str] = field(default_factory=dict)
    stacked: Callable[[MixtureOfExperts], list[Entry]] = lambda part: []
    rows: Mapping[str, str] = field(default_factory=dict)
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    ignored: Mapping[str, str] = field(default_factory=lambda: NO_BUFFERS)
    elsewhere: tuple[str, ...] = ()

    def __call__(self, spec: Model, family: str) -> TensorTable:
        """Returns the table; raises InputError naming the first weight that the family's files have no name for."""
        again = {f"{self.outside['head']}.weight": "embedding.weight"} if isinstance(spec.head, TiedHead) else {}
        return TensorTable(entries=tuple(self.entries(spec, family)), ignored=dict(self.ignored), duplicates=again)

    def entries(self, spec: Model, family: str, path: str = "", prefix: str = "") -> list[Entry]:
        """Returns the entries of the model at `path`, but of its encoder and vision; `prefix` begins all names."""
        entries = []
        for name, child in spec.children():
            if not name.startswith(("blocks.", "encoder", "vision")):
                entries += self._named(child, f"{name}.", path, self.outside, prefix, family, self.elsewhere)
        for i, block in enumerate(spec.blocks):
            entries += self.inside(block, f"{path}blocks.{i}.", f"{prefix}{self.layers}.{i}.", family)
        return entries

    def inside(self, block: Block, path: str, prefix: str, family: str) -> list[Entry]:
        """Returns the entries of a block at `path`, whose tensors' names begin with `prefix`."""
        entries, elsewhere = self._joined(block, path, prefix, family), self.elsewhere
        elsewhere += tuple(stem for fused in self.fused.values() for stem in fused.stems)
        for branch in block.branches:
            if isinstance(branch.body, MixtureOfExperts):
                own = self._experts(branch.body)
                elsewhere += (f"{branch.name}.body",) if own else ()
                entries += [_below(one, f"{path}{branch.name}.body.", prefix) for one in own]
        return entries + self._named(block, "", path, self.stems, prefix, family, elsewhere)

    def _named(
        self,
        part: Part,
        name: str,
        path: str,
        stems: Mapping[str, str],
        prefix: str,
        family: str,
        elsewhere: tuple[str, ...],
    ) -> list[Entry]:
        """Returns one entry for each weight of the part, whose names begin with `name`, in the table of `stems`."""
        entries = []
        for weight, held, _ in stored_weights(part):
            whole = f"{name}{weight}"
            stem, _, kind = whole.rpartition(".")
            if whole in self.rows:
                n = held.shape[0]
                names = tuple(prefix + self.rows[whole].format(i) for i in range(n))
                entries.append(Entry(paths=(path + whole,), names=names, layout=StackExperts(n)))
                continue
            if stem not in elsewhere:
                stored = stems.get(whole) or (f"{stems[stem]}.{kind}" if stem in stems else None)
                if stored is None:
                    raise InputError(f"{family} files have no name for this weight", field=path + whole)
                layout = self.layouts.get(whole) or self.layouts.get(stem)
                entries.append(entry(path + whole, prefix + stored, layout))
        return entries

    def _experts(self, part: MixtureOfExperts) -> list[Entry]:
        """Returns the entries of a mixture's own weights, with paths below it and names below its layer."""
        n, held = part.n_experts, part.local_weights().keys()
        each = [
            Entry(paths=(own,), names=tuple(pattern.format(e) for e in range(n)), layout=StackExperts(n))
            for own, pattern in self.experts.items()
        ]
        return [one for one in (*each, *self.stacked(part)) if held >= {*one.paths}]

    def _joined(self, block: Block, path: str, prefix: str, family: str) -> list[Entry]:
        """Returns the entries of what is stored as one, weights and, where there are any, biases."""
        entries = []
        rows = {name: weight.shape[0] for name, weight, _ in stored_weights(block)} if self.fused else {}
        for stored, fused in self.fused.items():
            for kind in ("weight", "bias"):
                names = [f"{stem}.{kind}" for stem in fused.stems]
                lacks = next((name for name in names if name not in rows), None)
                if lacks is None:
                    layout = fused.join(block, tuple(rows[name] for name in names))
                    paths = tuple(path + name for name in names)
                    entries.append(Entry(paths=paths, names=(f"{prefix}{stored}.{kind}",), layout=layout))
                elif any(name in rows for name in names):
                    raise InputError(f"{family} models have this weight", field=path + lacks)
        return entries


def _below(one: Entry, path: str, prefix: str) -> Entry:
    return replace(one, paths=tuple(path + own for own in one.paths), names=tuple(prefix + name for name in one.names))
