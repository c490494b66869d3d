"""Tokens of each text through all layers in one native call: what Python and torch cost each operation is saved.

It computes in float32 what the modules would, for stacks whose layers are all plain attention and a gated feed-forward,
each after an RMSNorm, with weights as they are or interleaved (`nn.build.interleave`), in float32, bfloat16 or float16.
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
from asbuilt.nn.cache import Cache, KVCache
from asbuilt.nn.feedforward import GatedMLP
from asbuilt.nn.linear import Linear
from asbuilt.nn.norms import RMSNorm
from asbuilt.nn.positions import rope_tables
from asbuilt.nn.step import Step
from asbuilt.spec import attention, block, feedforward
from asbuilt.spec.norms import RMSNorm as RMSNormPart
from asbuilt.spec.positions import Rotary

RUN = 256  # positions whose RoPE tables are computed together, for steps of one token


class _Norm(ctypes.Structure):
    _fields_ = (("weight", c_void_p), ("offset", c_float), ("eps", c_float))


class _Map(ctypes.Structure):
    _fields_ = (("matrix", native.PackedMatrix), ("bias", c_void_p))


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Norm) for name in ("attention_norm", "ffn_norm", "q_norm", "k_norm")),
        *((name, _Map) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        *((name, c_int64) for name in ("heads", "key_heads", "d_head", "slots")),
        *((name, c_void_p) for name in ("keys", "values")),
        ("type", c_int),
        *((name, c_int) for name in ("rope", "d_rotary", "adjacent")),
        *((name, c_float) for name in ("scale", "attention_scale", "ffn_scale")),
        ("activation", c_int),
    )


class _Rope(ctypes.Structure):
    _fields_ = (("cos", c_void_p), ("sin", c_void_p), ("stride", c_int64))


class Pieces(NamedTuple):
    """The modules of one layer."""

    first: Branch
    mixer: Attention
    second: Branch
    ffn: GatedMLP


class NativeLayers:
    """The layers of a stack as one native call, prepared again when weights or cache have moved."""

    def __init__(self, blocks: nn.ModuleList, pieces: list[Pieces], width: int) -> None:
        self.pieces, self.width = pieces, width
        self.hooks = [hooks for one in blocks.modules() for hooks in (one._forward_hooks, one._forward_pre_hooks)]
        self.weights = list(blocks.parameters())
        self.dtype = next(weight.dtype for weight in self.weights if weight.is_floating_point())
        found = dict.fromkeys(one.mixer.part.positions for one in pieces)
        self.rotaries = [rotary for rotary in found if isinstance(rotary, Rotary)]
        self.places: list[int] = []
        self.layers: Any = None
        self.turns: dict[Rotary, tuple[int, RopeTables]] = {}

    def __call__(self, x_BTM: Tensor, step: Step) -> Tensor | None:
        """Returns the stream (B, T, M) after the layers, None where the modules must run."""
        lib, cache = native.ready(x_BTM, dtype=self.dtype), step.cache
        if lib is None or cache is None or any(self.hooks):
            return None
        kept = [tensor for layer in cache.layers.values() for tensor in layer.tensors]
        for tensor in kept:
            if tensor.dtype is not self.dtype or tensor.shape[0] != step.batch or not tensor.is_contiguous():
                return None
        # rows that are dropped move a cache
        places = [*map(Tensor.data_ptr, self.weights), *map(Tensor.data_ptr, kept), *(x.shape[2] for x in kept)]
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
        return self.__dict__ | {"places": [], "layers": None}

    def prepare(self, cache: Cache) -> None:
        """Fills in the layers' pointers."""
        self.layers = (_Layer * len(self.pieces))()
        for layer, (first, mixer, second, ffn) in zip(self.layers, self.pieces, strict=True):
            part = mixer.part
            keys, values = cache.layer(mixer.path, KVCache).tensors  # of the model's dtype
            rotary = part.positions if isinstance(part.positions, Rotary) else None
            layer.attention_norm, layer.ffn_norm = _norm(first.norm), _norm(second.norm)
            layer.q_norm, layer.k_norm = _norm(mixer.q_norm), _norm(mixer.k_norm)
            for name, one in (*_maps(mixer, "q", "k", "v", "o"), *_maps(ffn, "gate", "up", "down")):
                setattr(layer, name, _Map(native.matrix(one.weight, one.format), native.pointer(one.bias)))
            layer.heads, layer.key_heads, layer.d_head = part.n_heads, part.n_kv_heads, part.d_head
            layer.keys, layer.values, layer.slots = keys.data_ptr(), values.data_ptr(), keys.shape[2]
            layer.type = native.number(native.NUMBERS[self.dtype])
            layer.rope = -1 if rotary is None else self.rotaries.index(rotary)
            layer.d_rotary = 0 if rotary is None else rotary.d_rotary
            layer.adjacent = int(rotary is not None and rotary.pairing == "adjacent")
            layer.scale, layer.attention_scale, layer.ffn_scale = mixer.scale, first.scale, second.scale
            layer.activation = native.ACTIVATIONS[ffn.named]


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
    """Returns the modules of a block of attention and a gated feed-forward, if the call leaves out nothing of it."""
    if not isinstance(one, Block) or one.part != block.Block(branches=one.part.branches):
        return None
    if [branch.name for branch in one.part.branches] != ["attention", "ffn"]:
        return None
    first, second = one.get_submodule("attention"), one.get_submodule("ffn")
    if not (isinstance(first, Branch) and isinstance(second, Branch)):
        return None
    mixer, ffn = first.body, second.body
    if not (isinstance(mixer, Attention) and isinstance(ffn, GatedMLP)):
        return None
    plain = (
        all(_plain_branch(branch) for branch in one.part.branches)
        and _plain_attention(mixer.part)
        and ffn.named in native.ACTIVATIONS
        and _plain_ffn(one.part.branches[1].body)
        and all(_plain_map(one) for _, one in (*_maps(mixer, "q", "k", "v", "o"), *_maps(ffn, "gate", "up", "down")))
        and len({weight.dtype for weight in one.parameters()} - {torch.uint8}) == 1
        and all(weight.dtype in (*native.NUMBERS, torch.uint8) for weight in one.parameters())
    )
    return Pieces(first, mixer, second, ffn) if plain else None


def _plain_branch(branch: block.Branch) -> bool:
    usual = block.Branch(name=branch.name, norm=branch.norm, body=branch.body, scale=branch.scale)
    return branch == usual and isinstance(branch.norm, RMSNormPart)


def _plain_attention(part: attention.Attention) -> bool:
    names = ("d_model", "n_heads", "n_kv_heads", "d_head", "bias", "output_bias", "key_bias", "q_norm", "k_norm")
    kept = (*names, "positions", "scale", "q", "k", "v", "o")
    usual = attention.Attention(**{name: getattr(part, name) for name in kept})
    norms = all(
        norm is None or (isinstance(norm, RMSNormPart) and norm.d == part.d_head) for norm in (part.q_norm, part.k_norm)
    )
    places = part.positions
    turned = places is None or (isinstance(places, Rotary) and places == replace(places, axes=None, grid=None))
    return part == usual and norms and turned


def _plain_ffn(part: object) -> bool:
    if not isinstance(part, feedforward.GatedMLP):
        return False
    names = ("d_model", "d_ff", "activation", "bias", "gate", "up", "down")
    return part == feedforward.GatedMLP(**{name: getattr(part, name) for name in names})


def _plain_map(one: Linear) -> bool:
    return type(one) is Linear and not one.clipped and native.multiplies(one.weight, one.format)
