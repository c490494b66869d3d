"""What the tensors of a checkpoint folder are called: stems of paths to stems of names, and what is stored as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from asbuilt.errors import InputError
from asbuilt.families.shared.common import named_entries
from asbuilt.families.shared.table import Concat, Entry, Interleave, Layout, StackExperts, Table, entry
from asbuilt.spec import Attention, Block, MixtureOfExperts, Model, Parallel, TiedHead, stored_weights

NO_BUFFERS = {r"(.*\.)?rotary_emb\.inv_freq": "rotary frequencies, computed from the config"}
OUTSIDE = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}

ATTENTION = {f"attention.body.{part}": f"self_attn.{part}_proj" for part in "qkvo"}
GATED = {f"ffn.body.{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
NORMS = {"attention.norm": "input_layernorm", "ffn.norm": "post_attention_layernorm"}
QK_NORMS = {f"attention.body.{part}_norm": f"self_attn.{part}_norm" for part in "qk"}
STEMS = NORMS | ATTENTION | GATED
EXPERTS = {part: f"mlp.experts.{{}}.{part}_proj.weight" for part in ("gate", "up", "down")}
SHARED_EXPERTS = {f"ffn.body.shared.{part}": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}

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

    What is `fused` has its name first, `experts` a pattern for each of a part's own names in which `{}` is the number;
    `layouts` are those of stems that are not stored as built. Stems `elsewhere` have entries of their own. A tied head
    may be stored again.
    """

    stems: Mapping[str, str]
    outside: Mapping[str, str] = field(default_factory=lambda: OUTSIDE)
    layers: str = "model.layers"
    fused: Mapping[str, Fused] = field(default_factory=dict)
    experts: Mapping[str, str] = field(default_factory=dict)
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    ignored: Mapping[str, str] = field(default_factory=lambda: NO_BUFFERS)
    elsewhere: tuple[str, ...] = ()

    def __call__(self, spec: Model, family: str) -> Table:
        """Returns the table; raises InputError naming the first weight that the family's files have no name for."""
        entries = self._outside(spec, family)
        for i, block in enumerate(spec.blocks):
            entries += self._inside(block, f"blocks.{i}.", f"{self.layers}.{i}.", family)
        again = {f"{self.outside['head']}.weight": "embedding.weight"} if isinstance(spec.head, TiedHead) else {}
        return Table(entries=tuple(entries), ignored=dict(self.ignored), duplicates=again)

    def _outside(self, spec: Model, family: str) -> list[Entry]:
        entries = []
        for name, child in spec.children():
            if not name.startswith(("blocks.", "encoder", "vision")):
                for path, _, _ in stored_weights(child):
                    stem, _, kind = f"{name}.{path}".rpartition(".")
                    if stem not in self.outside:
                        raise InputError(f"{family} files have no name for this weight", field=f"{name}.{path}")
                    entries.append(entry(f"{name}.{path}", f"{self.outside[stem]}.{kind}", self.layouts.get(stem)))
        return entries

    def _inside(self, block: Block, path: str, prefix: str, family: str) -> list[Entry]:
        entries, elsewhere = self._joined(block, path, prefix, family), self.elsewhere
        elsewhere += tuple(stem for fused in self.fused.values() for stem in fused.stems)
        for branch in block.branches if self.experts else ():
            if isinstance(branch.body, MixtureOfExperts):
                elsewhere += (f"{branch.name}.body",)
                n = branch.body.n_experts
                entries += [
                    Entry(
                        paths=(f"{path}{branch.name}.body.{part}",),
                        names=tuple(prefix + pattern.format(e) for e in range(n)),
                        layout=StackExperts(n),
                    )
                    for part, pattern in self.experts.items()
                ]
        named = named_entries(block, path, dict(self.stems), prefix, dict(self.layouts), family, elsewhere)
        return entries + named

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
