"""Tokens of each text through all layers in one native call: what Python and torch cost each operation is saved.

It computes in float32 what the modules would, for stacks whose layers are plain attention or a gated delta net, then a
gated feed-forward, each after an RMSNorm, with weights as they are or interleaved (`nn.build.interleave`), in float32,
bfloat16 or float16.
Any other stack, a hook on a module, padding, or autograd: the modules run.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from ctypes import c_float, c_int, c_int64, c_void_p
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from asbuilt.kernels import native
from asbuilt.kernels.rotary import RopeTables, tables
from asbuilt.nn.attention import Attention
from asbuilt.nn.block import Block, Branch
from asbuilt.nn.cache import Cache, KVCache, LayerCache, StateCache
from asbuilt.nn.delta_net import GatedDeltaNet
from asbuilt.nn.feedforward import GatedMLP
from asbuilt.nn.linear import Linear
from asbuilt.nn.norms import RMSNorm
from asbuilt.nn.positions import rope_tables
from asbuilt.nn.step import Step
from asbuilt.spec import attention, block, delta_net, feedforward
from asbuilt.spec.norms import RMSNorm as RMSNormPart
from asbuilt.spec.positions import Rotary

RUN = 256  # positions whose RoPE tables are computed together, for steps of one token
NET_MAPS = ("q", "k", "v", "gate", "beta", "decay")


class _Norm(ctypes.Structure):
    _fields_ = (("weight", c_void_p), ("offset", c_float), ("eps", c_float))


class _Map(ctypes.Structure):
    _fields_ = (("matrix", native.PackedMatrix), ("bias", c_void_p))


class _Attention(ctypes.Structure):
    _fields_ = (
        *((name, _Norm) for name in ("q_norm", "k_norm")),
        *((name, _Map) for name in ("q", "k", "v", "gate")),
        *((name, c_int64) for name in ("heads", "key_heads", "d_head", "slots")),
        *((name, c_void_p) for name in ("keys", "values")),
        ("held", c_int),
        *((name, c_int) for name in ("rope", "d_rotary", "adjacent")),
        ("scale", c_float),
    )


class _DeltaNet(ctypes.Structure):
    _fields_ = (
        ("norm", _Norm),
        *((name, _Map) for name in ("q", "k", "v", "gate", "beta", "decay")),
        *((name, c_int64) for name in ("key_heads", "values_per_key", "d_key", "d_value", "kernel")),
        *((name, c_void_p) for name in ("taps", "bias", "A_log", "dt_bias", "before", "state")),
        *((name, c_int) for name in ("silu", "gating")),
        ("eps", c_float),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("attention", "net")),
        *((name, _Norm) for name in ("norm", "ffn_norm")),
        *((name, _Map) for name in ("o", "gate", "up", "down")),
        ("type", c_int),
        *((name, c_float) for name in ("mixer_scale", "ffn_scale")),
        ("activation", c_int),
    )


class _Rope(ctypes.Structure):
    _fields_ = (("cos", c_void_p), ("sin", c_void_p), ("stride", c_int64))


class Pieces(NamedTuple):
    """The modules of one layer."""

    first: Branch
    mixer: Attention | GatedDeltaNet
    second: Branch
    ffn: GatedMLP


class NativeLayers:
    """The layers of a stack as one native call, prepared again when weights or cache have moved."""

    def __init__(self, blocks: nn.ModuleList, pieces: list[Pieces], width: int) -> None:
        self.pieces, self.width = pieces, width
        self.hooks = [hooks for one in blocks.modules() for hooks in (one._forward_hooks, one._forward_pre_hooks)]
        self.weights = list(blocks.parameters())
        self.dtype = next(weight.dtype for weight in self.weights if weight.is_floating_point())
        found = dict.fromkeys(one.mixer.part.positions for one in pieces if isinstance(one.mixer, Attention))
        self.states = {one.mixer.path for one in pieces if isinstance(one.mixer, GatedDeltaNet)}
        self.rotaries = [rotary for rotary in found if isinstance(rotary, Rotary)]
        self.places: list[int] = []
        self.layers: Any = None
        self.mixers: list[ctypes.Structure] = []  # what the layers point to
        self.turns: dict[Rotary, tuple[int, RopeTables]] = {}

    def __call__(self, x_BTM: Tensor, step: Step) -> Tensor | None:
        """Returns the stream (B, T, M) after the layers, None where the modules must run."""
        lib, cache = native.ready(x_BTM, dtype=self.dtype), step.cache
        if lib is None or cache is None or any(self.hooks):
            return None
        kept = [tensor for layer in cache.layers.values() for tensor in layer.tensors]
        if any(tensor.shape[0] != step.batch or not tensor.is_contiguous() for tensor in kept):
            return None
        held = [self.held(path, layer) for path, layer in cache.layers.items()]
        if None in held:
            return None
        # rows that are dropped move a cache
        places = [*map(Tensor.data_ptr, self.weights), *map(Tensor.data_ptr, kept), *(x.shape[2] for x in kept), *held]
        if places != self.places:
            self.prepare(cache)
            self.places = places
        x = x_BTM.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        B = step.batch
        ropes = (_Rope * len(self.rotaries))(*(self.rope(step, rotary) for rotary in self.rotaries))
        positions = (c_int64 * B)(*step.past)
        run = (len(self.pieces), ropes, positions, B, step.tokens, self.width, torch.get_num_threads())
        lib.asbuilt_layers(self.layers, *run, x.data_ptr())
        return x.to(self.dtype)

    def rope(self, step: Step, rotary: Rotary) -> _Rope:
        """Returns the tables of a pass; those of single tokens at one position are computed for a run of positions."""
        run, place = divmod(step.past[0], RUN)
        if step.tokens > 1 or not step.uniform or rotary.depends_on_length:
            t = rope_tables(step, rotary, torch.float32)
            return _Rope(t.cos.data_ptr(), t.sin.data_ptr(), t.cos[0].numel() if t.cos.shape[0] > 1 else 0)
        known, t = self.turns.get(rotary, (-1, None))
        if t is None or known != run:
            t = tables(rotary, torch.arange(run * RUN, (run + 1) * RUN)[None], step.reach[:1], torch.float32)
            self.turns[rotary] = run, t
        at = place * t.cos.stride(1) * t.cos.itemsize
        return _Rope(t.cos.data_ptr() + at, t.sin.data_ptr() + at, 0)

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the model begins without pointers, which are those of its own weights."""
        return self.__dict__ | {"places": [], "layers": None, "mixers": []}

    def held(self, path: str, layer: LayerCache) -> str | None:
        """Returns the library's name of what a layer's cache holds, None if the call does not read that."""
        if isinstance(layer, KVCache) and layer.code is not None and layer.code.dtype is torch.uint8:
            return layer.code.name
        if isinstance(layer, KVCache):
            return native.NUMBERS.get(layer.tensors[0].dtype)
        dtype = torch.float32 if path in self.states else self.dtype
        return native.NUMBERS[dtype] if all(tensor.dtype is dtype for tensor in layer.tensors) else None

    def prepare(self, cache: Cache) -> None:
        """Fills in the layers' pointers."""
        self.layers, self.mixers = (_Layer * len(self.pieces))(), []
        for layer, (first, mixer, second, ffn) in zip(self.layers, self.pieces, strict=True):
            made = self.attention(mixer, cache) if isinstance(mixer, Attention) else self.net(mixer, cache)
            self.mixers.append(made)
            setattr(layer, "attention" if isinstance(mixer, Attention) else "net", ctypes.addressof(made))
            layer.norm, layer.ffn_norm = _norm(first.norm), _norm(second.norm)
            _fill(layer, mixer, "o")
            _fill(layer, ffn, "gate", "up", "down")
            layer.type = native.number(native.NUMBERS[self.dtype])
            layer.mixer_scale, layer.ffn_scale = first.scale, second.scale
            layer.activation = native.ACTIVATIONS[ffn.named]

    def attention(self, mixer: Attention, cache: Cache) -> _Attention:
        """Returns what the call reads of attention."""
        part, made = mixer.part, _Attention()
        layer = cache.layer(mixer.path, KVCache)
        keys, values = layer.tensors
        rotary = part.positions if isinstance(part.positions, Rotary) else None
        made.q_norm, made.k_norm = _norm(mixer.q_norm), _norm(mixer.k_norm)
        _fill(made, mixer, "q", "k", "v", *(("gate",) if part.gating else ()))
        made.heads, made.key_heads, made.d_head = part.n_heads, part.n_kv_heads, part.d_head
        made.keys, made.values, made.slots = keys.data_ptr(), values.data_ptr(), keys.shape[2]
        made.held = native.number(self.held(mixer.path, layer) or "")
        made.rope = -1 if rotary is None else self.rotaries.index(rotary)
        made.d_rotary = 0 if rotary is None else rotary.d_rotary
        made.adjacent = int(rotary is not None and rotary.pairing == "adjacent")
        made.scale = mixer.scale
        return made

    def net(self, mixer: GatedDeltaNet, cache: Cache) -> _DeltaNet:
        """Returns what the call reads of a gated delta net."""
        part, conv, made = mixer.part, mixer.conv, _DeltaNet()
        made.norm = _norm(mixer.norm)
        _fill(made, mixer, *NET_MAPS)
        made.key_heads, made.values_per_key = part.n_key_heads, part.values_per_key
        made.d_key, made.d_value, made.kernel = part.d_key, part.d_value, part.conv.kernel
        made.taps, made.bias = conv.weight.data_ptr(), native.pointer(conv.bias)
        made.A_log, made.dt_bias = mixer.A_log.data_ptr(), mixer.dt_bias.data_ptr()
        made.before = cache.layer(conv.path, StateCache).tensors[0].data_ptr() if part.conv.kernel > 1 else None
        made.state = cache.layer(mixer.path, StateCache).tensors[0].data_ptr()
        made.silu, made.gating = int(part.conv.activation == "silu"), native.GATINGS[part.gating]
        made.eps = part.length_eps
        return made


def _fill(made: ctypes.Structure, owner: nn.Module, *names: str) -> None:
    for name, one in _maps(owner, *names):
        setattr(made, name, _Map(native.matrix(one.weight, one.format), native.pointer(one.bias)))


def _norm(norm: nn.Module | None) -> _Norm:
    if norm is None:
        return _Norm(None, 0.0, -1.0)
    assert isinstance(norm, RMSNorm)
    return _Norm(native.pointer(norm.weight), float(norm.offset), norm.eps)


def _maps(owner: nn.Module, *names: str) -> Iterator[tuple[str, Linear]]:
    for name in names:
        one = owner.get_submodule(name)
        assert isinstance(one, Linear)
        yield name, one


def native_layers(blocks: nn.ModuleList, width: int) -> NativeLayers | None:
    """Returns the blocks as one native call, None if one of them is not of the kind that it computes."""
    if native.library() is None or not len(blocks):
        return None
    pieces = [_pieces(one) for one in blocks]
    whole = [one for one in pieces if one is not None]
    return NativeLayers(blocks, whole, width) if len(whole) == len(pieces) else None


def _pieces(one: nn.Module) -> Pieces | None:
    """Returns the modules of a block of a mixer and a gated feed-forward, if the call leaves out nothing of it."""
    if not isinstance(one, Block) or one.part != block.Block(branches=one.part.branches) or len(one.part.branches) != 2:
        return None
    first, second = (one.get_submodule(branch.name) for branch in one.part.branches)
    if not (isinstance(first, Branch) and isinstance(second, Branch)):
        return None
    mixer, ffn = first.body, second.body
    if not isinstance(ffn, GatedMLP):
        return None
    if isinstance(mixer, Attention):
        names, plain = ("q", "k", "v", "o", *(("gate",) if mixer.part.gating else ())), _plain_attention(mixer.part)
    elif isinstance(mixer, GatedDeltaNet):
        names, plain = (*NET_MAPS, "o"), _plain_net(mixer)
    else:
        return None
    plain = (
        plain
        and all(_plain_branch(branch) for branch in one.part.branches)
        and ffn.named in native.ACTIVATIONS
        and _plain_ffn(one.part.branches[1].body)
        and all(_plain_map(one) for _, one in (*_maps(mixer, *names), *_maps(ffn, "gate", "up", "down")))
        and len({weight.dtype for weight in one.parameters()} - {torch.uint8}) == 1
        and all(weight.dtype in (*native.NUMBERS, torch.uint8) for weight in one.parameters())
    )
    return Pieces(first, mixer, second, ffn) if plain else None


def _plain_branch(branch: block.Branch) -> bool:
    usual = block.Branch(name=branch.name, norm=branch.norm, body=branch.body, scale=branch.scale)
    return branch == usual and isinstance(branch.norm, RMSNormPart)


def _plain_attention(part: attention.Attention) -> bool:
    names = ("d_model", "n_heads", "n_kv_heads", "d_head", "bias", "output_bias", "key_bias", "q_norm", "k_norm")
    kept = (*names, "positions", "scale", "gating", "q", "k", "v", "gate", "o")
    usual = attention.Attention(**{name: getattr(part, name) for name in kept})
    norms = all(
        norm is None or (isinstance(norm, RMSNormPart) and norm.d == part.d_head) for norm in (part.q_norm, part.k_norm)
    )
    places = part.positions
    turned = places is None or (isinstance(places, Rotary) and places == replace(places, axes=None, grid=None))
    return part == usual and norms and turned and part.gating in (None, "channel")


def _plain_net(mixer: GatedDeltaNet) -> bool:
    """Returns whether the call computes a gated delta net: with a decay for each head, from single maps."""
    part, conv = mixer.part, mixer.part.conv
    names = ("d_model", "n_key_heads", "n_value_heads", "d_key", "d_value", "conv", "norm", "gating", "length_eps")
    usual = delta_net.GatedDeltaNet(**{name: getattr(part, name) for name in (*names, *NET_MAPS, "o")})
    return (
        part == usual
        and isinstance(part.norm, RMSNormPart)
        and part.norm.d == part.d_value
        and part.d_value % 8 == 0
        and conv.activation in ("silu", None)
        and (conv.cached or conv.kernel == 1)
        and mixer.conv.weight.is_contiguous()
    )


def _plain_ffn(part: object) -> bool:
    if not isinstance(part, feedforward.GatedMLP):
        return False
    names = ("d_model", "d_ff", "activation", "bias", "gate", "up", "down")
    return part == feedforward.GatedMLP(**{name: getattr(part, name) for name in names})


def _plain_map(one: Linear) -> bool:
    return type(one) is Linear and not one.clipped and native.multiplies(one.weight, one.format)
