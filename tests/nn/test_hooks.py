"""A hook on any linear map fires once in each pass that runs it, with gradients or without, and changes no answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import pytest
import strategies
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import asbuilt
from asbuilt.nn.cache import Cache
from asbuilt.nn.linear import Linear
from asbuilt.nn.model import Model
from asbuilt.spec import BlockIndexer, EntryIndexer, Indexer, walk
from asbuilt.spec import Model as Spec

Modes = st.sampled_from([torch.enable_grad, torch.no_grad, torch.inference_mode])
Mode = Callable[[], AbstractContextManager[object]]


def watched(model: Model, seen: Counter[str]) -> None:
    for path, module in model.named_modules():
        if isinstance(module, Linear):
            module.register_forward_hook(partial(_count, seen, path))


def _count(seen: Counter[str], path: str, module: nn.Module, args: object, output: object) -> None:
    assert isinstance(output, torch.Tensor)
    seen[path] += 1


def without(seen: Counter[str], below: list[str]) -> Counter[str]:
    return Counter({path: count for path, count in seen.items() if not path.startswith(tuple(below))})


def _plus_one(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
    return output + 1


@settings(max_examples=20)
@given(spec=strategies.specs(), seed=strategies.SEEDS, mode=Modes)
def test_every_map_is_seen_in_every_pass(spec: Spec, seed: int, mode: Mode) -> None:
    """Prefill and decode, of attention, latent attention, and feed-forwards alike."""
    model = strategies.randomised(spec, seed, torch.float64)
    tokens = strategies.random_tokens(spec.n_vocab, 2, 6, seed=seed)
    wanted = model(tokens).detach()
    seen: Counter[str] = Counter()
    watched(model, seen)
    maps = {path for path, module in model.named_modules() if isinstance(module, Linear)}
    maps -= {path for path in maps if path.startswith("predictors")}  # no pass runs them
    # an indexer that can choose every token has nothing to choose
    most = {path: part.top_k for path, part in walk(spec) if isinstance(part, Indexer)}
    most |= {path: part.most_keys for path, part in walk(spec) if isinstance(part, BlockIndexer)}
    most |= {path: tokens.shape[1] for path, part in walk(spec) if isinstance(part, EntryIndexer)}  # or few entries
    spared = [path for path, count in most.items() if count >= tokens.shape[1]]
    maps -= {path for path in maps if path.startswith(tuple(spared))}
    uses = Counter(maps) + Counter(held for held in spec.holders.values() if held in maps)
    with mode():
        have = model(tokens)
        assert without(seen, spared) == uses
        torch.testing.assert_close(have, wanted)
        cache = Cache(spec, batch=2, capacity=6, dtype=torch.float64)
        model(tokens[:, :5], cache=cache)
        seen.clear()
        have = model(tokens[:, 5:], cache=cache)
    if not cache.reread:
        assert without(seen, spared) == uses
    torch.testing.assert_close(have, wanted[:, 5:])


@given(spec=strategies.specs(max_blocks=1), seed=strategies.SEEDS, mode=Modes)
@settings(max_examples=10)
def test_what_a_hook_gives_is_what_counts(spec: Spec, seed: int, mode: Mode) -> None:
    """Hooks may change what a map reads and gives: here each result grows by 1."""
    model = strategies.randomised(spec, seed, torch.float64)
    tokens = strategies.random_tokens(spec.n_vocab, 1, 4, seed=seed)
    handles = [module.register_forward_hook(_plus_one) for module in model.modules() if isinstance(module, Linear)]
    with torch.enable_grad():
        wanted = model(tokens).detach()
    with mode():
        torch.testing.assert_close(model(tokens), wanted)
    for handle in handles:
        handle.remove()


def test_a_hook_on_all_modules_sees_what_usually_runs() -> None:
    """Profilers and FLOP counters set such hooks: they do not part what is otherwise one product."""
    model = asbuilt.build(asbuilt.decoder(d_model=8, n_layers=1, n_heads=2, n_vocab=5))
    seen: list[nn.Module] = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: seen.append(module))
    try:
        with torch.no_grad():
            model(torch.tensor([[1, 2]]))
    finally:
        handle.remove()
    called = {path for path, m in model.named_modules() if isinstance(m, Linear) and m in seen}
    assert called == {"blocks.0.attention.body.o", "blocks.0.ffn.body.down"}


@pytest.mark.parametrize("path", ["blocks.0.attention.body.k", "blocks.0.ffn.body.gate"])
def test_without_hooks_maps_of_one_input_are_one_product(path: str) -> None:
    """And are so again once a hook is gone."""
    model = asbuilt.build(asbuilt.decoder(d_model=8, n_layers=1, n_heads=2, n_vocab=5))
    calls: list[str] = []
    module = model.get_submodule(path)
    forward = module.forward
    module.forward = lambda x: calls.append(path) or forward(x)
    with torch.no_grad():
        model(torch.tensor([[1, 2]]))
        assert calls == []
        handle = module.register_forward_pre_hook(lambda module, args: None)
        model(torch.tensor([[1, 2]]))
        assert calls == [path]
        handle.remove()
        model(torch.tensor([[1, 2]]))
        assert calls == [path]
