"""The parts of a spec, under the argument names of the families' `build` functions: what a config is written from.

A config says one number for all layers, so each is taken from the first layer that has it. Whether the others agree is
not asked here: the config that is written is read again and compared with the spec (`Family.write`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from operator import attrgetter
from typing import Any, TypeVar, cast

from asbuilt.errors import InputError
from asbuilt.spec import (
    MLP,
    Attention,
    Branch,
    EncoderDecoder,
    FeedForward,
    GatedMLP,
    Head,
    HeadTransform,
    Mixer,
    MixtureOfExperts,
    Model,
    Norm,
    Parallel,
    Part,
    Rotary,
    TiedHead,
    TokenEmbedding,
)

P = TypeVar("P", bound=Part)
W = TypeVar("W", bound=Model)


def expect(value: object, kind: type[P], path: str, family: str) -> P:
    """Returns `value`; raises InputError naming its path unless it is a part of that kind."""
    if not isinstance(value, kind):
        raise InputError(f"{family} needs {kind.__name__} here", field=path, value=repr(value))
    return value


def expect_whole(spec: Model, kind: type[W], family: str) -> W:
    """Returns the spec; raises InputError unless it is a whole of that kind."""
    if not isinstance(spec, kind):
        raise InputError(f"{family} needs {kind.__name__} here", field="model", value=type(spec).__name__)
    return spec


class Parts:
    """The parts of a spec that a config is written from; `carried` is what it may keep of the config that was read.

    Where the spec is a part of another, `around` are that one's. Every property raises InputError naming the place
    where the family has a part that the spec lacks.
    """

    def __init__(self, model: Model, family: str, carried: Mapping[str, Any], around: Parts | None = None) -> None:
        self.model, self.family, self.carried, self.around = model, family, carried, around or self
        self.asks_head = False  # whether something of the language model's head was asked for

    # the fields of parts, by the names of `build`
    d_model = property(attrgetter("model.d_model"))
    n_vocab = property(attrgetter("model.n_vocab"))
    n_layers = property(attrgetter("model.n_layers"))
    max_positions = property(attrgetter("model.max_positions"))
    eps = property(attrgetter("norm.eps"))
    n_heads = property(attrgetter("attention.n_heads"))
    n_kv_heads = property(attrgetter("attention.n_kv_heads"))
    d_head = property(attrgetter("attention.d_head"))
    d_ff = property(attrgetter("ffn.d_ff"))
    activation = property(attrgetter("ffn.activation"))
    bias = property(attrgetter("attention.bias"))
    mlp_bias = property(attrgetter("ffn.bias"))
    window = property(attrgetter("attention.window"))
    softcap = property(attrgetter("attention.softcap"))
    embedding_scale = property(attrgetter("embedding.scale"))
    branch_scale = property(attrgetter("first.scale"))
    logit_scale = property(attrgetter("head.scale"))
    logit_softcap = property(attrgetter("head.softcap"))

    def at(self, path: str) -> Any:  # noqa: ANN401
        """Returns what stands at a path that begins here or in the model; raises InputError where nothing does."""
        first = path.partition(".")[0]
        found: Any = self if first == "model" or hasattr(type(self), first) else self.model
        names = path.split(".")
        for i, name in enumerate(names):
            if not hasattr(type(found), name) and not hasattr(found, name):
                where = ".".join(names[:i]) or name
                raise InputError(f"{self.family} needs a part with {name} here", field=where, value=repr(found))
            found = getattr(found, name)
        return found

    @property
    def encoder(self) -> Parts:
        """The parts of the encoder."""
        return Parts(self.whole(EncoderDecoder).encoder, self.family, self.carried)

    @property
    def mixer(self) -> Mixer:
        """The first block's mixer."""
        return cast(Mixer, self.first.body)

    def expect(self, value: object, kind: type[P], path: str) -> P:
        """Returns `value`; raises InputError naming its path unless it is a part of that kind."""
        return expect(value, kind, path, self.family)

    def whole(self, kind: type[W]) -> W:
        """Returns the model; raises InputError unless it is a whole of that kind."""
        return expect_whole(self.model, kind, self.family)

    @property
    def tied(self) -> bool:
        """Whether the head shares the embedding's table."""
        self.asks_head = True
        return isinstance(self.model.head, TiedHead)

    @property
    def head(self) -> Head | TiedHead:
        """The language model's head."""
        self.asks_head = True
        found = self.model.head
        if not isinstance(found, Head | TiedHead):
            raise InputError(f"{self.family} needs a language model's head here", field="head", value=repr(found))
        return found

    @property
    def transform(self) -> HeadTransform:
        """The transform before the head, a language model's or a classifier's."""
        found = getattr(self.model.head, "transform", None)
        self.asks_head = self.asks_head or not isinstance(found, HeadTransform)
        return self.expect(found, HeadTransform, "head.transform")

    @property
    def embedding(self) -> TokenEmbedding:
        """The table of tokens."""
        return self.expect(self.model.embedding, TokenEmbedding, "embedding")

    @property
    def norm(self) -> Norm:
        """The norm before the head."""
        if self.model.norm is None:
            raise InputError(f"{self.family} needs a norm here", field="norm", value=repr(None))
        return self.model.norm

    @property
    def first(self) -> Branch:
        """The first block's first branch."""
        return self.model.blocks[0].branches[0]

    @property
    def last(self) -> Branch:
        """The first block's last branch that reads the stream, rather than the block's input again."""
        return next(one for one in reversed(self.model.blocks[0].branches) if not one.block_input)

    @cached_property
    def attentions(self) -> list[Attention]:
        """The attention of every block's first branch, where it is one or stands beside another part."""
        bodies = [block.branches[0].body for block in self.model.blocks]
        found = [body.attention if isinstance(body, Parallel) else body for body in bodies]
        return [body for body in found if isinstance(body, Attention)]

    @property
    def attention(self) -> Attention:
        """The first layer's attention."""
        return self.expect(next(iter(self.attentions), self.first.body), Attention, f"blocks.0.{self.first.name}.body")

    @property
    def ffn(self) -> FeedForward:
        """The first layer's feed-forward."""
        branch = self.last
        body = branch.body.ffn if isinstance(branch.body, Parallel) else branch.body
        if not isinstance(body, MLP | GatedMLP | MixtureOfExperts):
            path = f"blocks.0.{branch.name}.body"
            raise InputError(f"{self.family} needs a feed-forward here", field=path, value=repr(body))
        return body

    @property
    def rotary(self) -> Rotary:
        """The RoPE of the first layer that has any, or else that of whole heads."""
        found = (layer.positions for layer in self.attentions)
        return next((one for one in found if isinstance(one, Rotary)), Rotary(d_rotary=self.d_head))

    @property
    def head_norms(self) -> bool:
        """Whether each head's queries and keys are normed."""
        return self.attention.q_norm is not None

    @property
    def score_scale(self) -> float:
        """What scores are multiplied by."""
        return self.d_head**-0.5 if self.attention.scale is None else self.attention.scale

    @property
    def mixture(self) -> MixtureOfExperts:
        """The first mixture of experts."""
        bodies = (branch.body for block in self.model.blocks for branch in block.branches)
        found = next((body for body in bodies if isinstance(body, MixtureOfExperts)), None)
        if found is None:
            raise InputError(f"{self.family} needs a block with experts", field="blocks")
        return found

    @property
    def dense(self) -> GatedMLP | None:
        """The first gated feed-forward that stands in the place of experts, None where there is none."""
        bodies = (block.branches[-1].body for block in self.model.blocks)
        return next((body for body in bodies if isinstance(body, GatedMLP)), None)
