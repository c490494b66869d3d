"""What the plan says of state and peaks, on built models: optimizers that took a step, and PyTorch's allocator."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import strategies
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from asbuilt.catalog import machines
from asbuilt.errors import InputError
from asbuilt.families import llama
from asbuilt.measure.run import peak_bytes
from asbuilt.nn import build
from asbuilt.nn.model import Model as Built
from asbuilt.plan import train
from asbuilt.plan.train.optimizers import EIGHT_BIT_BLOCK, EIGHT_BIT_LEAST, nf4_bytes, orthogonal
from asbuilt.spec import (
    RGLRU,
    BlockIndexer,
    CausalConvolution,
    CentredConvolution,
    EntryIndexer,
    Indexer,
    MixtureOfExperts,
    Model,
    ProjectedStreams,
    Rotary,
    walk,
    weights,
)

H100 = machines.find("h100-sxm")
# Indexers learn from a loss of their own, so this one gives them no gradient.
SPECS = strategies.specs(max_blocks=2).filter(
    lambda spec: not any(isinstance(part, Indexer | EntryIndexer | BlockIndexer) for _, part in walk(spec))
)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def without_predictors(spec: Model) -> Model:
    """The model without the layers that predict further tokens, which the plan leaves out of training."""
    return spec.without_extras


def stepped(spec: Model, dtype: torch.dtype) -> Built:
    """A built model with the gradients of one backward pass."""
    model = strategies.randomised(without_predictors(spec), 0, dtype)
    tokens = torch.zeros(1, 4, dtype=torch.long)
    F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten()).backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    return model


def nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def kept(optimizers: Iterable[torch.optim.Optimizer], *names: str) -> int:
    """Bytes of the named state, or of all tensors of more than the step's count where none are named."""
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    return nbytes(state[name] for state in states for name in names if name in state)


def state(spec: Model, optimizer: str, dtype: str, **changes: Any) -> Any:  # noqa: ANN401
    return train(spec, H100, optimizer=optimizer, dtype=dtype, seq=4, master=False, **changes).state


@given(SPECS, st.sampled_from(list(DTYPES)))
@settings(max_examples=12)
def test_adamw(spec: Model, dtype: str) -> None:
    model, found = stepped(spec, DTYPES[dtype]), state(spec, "adamw", dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    assert found.weights == nbytes(model.parameters())
    assert found.gradients == nbytes(p.grad for p in model.parameters() if p.grad is not None)
    assert found.optimizer["first moment"] == kept([optimizer], "exp_avg")
    assert found.optimizer["second moment"] == kept([optimizer], "exp_avg_sq")
    assert found.master == 0


@given(SPECS, st.sampled_from(list(DTYPES)))
@settings(max_examples=12)
def test_sgd_with_momentum(spec: Model, dtype: str) -> None:
    model = stepped(spec, DTYPES[dtype])
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    optimizer.step()
    assert state(spec, "sgd-momentum", dtype).optimizer == {"momentum": kept([optimizer], "momentum_buffer")}


@given(SPECS)
@settings(max_examples=12)
def test_adafactor_of_transformers(spec: Model) -> None:
    adafactor = pytest.importorskip("transformers.optimization").Adafactor  # pyright: ignore
    model, found = stepped(spec, torch.float32), state(spec, "adafactor", "fp32").optimizer
    optimizer = adafactor(model.parameters())
    optimizer.step()
    assert found.get("row factors", 0) == kept([optimizer], "exp_avg_sq_row")
    assert found.get("column factors", 0) == kept([optimizer], "exp_avg_sq_col")
    assert found.get("second moment of vectors", 0) == kept([optimizer], "exp_avg_sq")


@given(SPECS)
@settings(max_examples=12)
def test_adafactor_of_pytorch(spec: Model) -> None:
    model, found = stepped(spec, torch.float32), state(spec, "adafactor", "fp32").optimizer
    optimizer = torch.optim.Adafactor(model.parameters())
    optimizer.step()
    assert found.get("row factors", 0) == kept([optimizer], "row_var")
    assert found.get("column factors", 0) == kept([optimizer], "col_var")
    assert found.get("second moment of vectors", 0) == kept([optimizer], "variance")


@given(SPECS)
@settings(max_examples=12)
def test_muon_for_matrices_and_adamw_for_the_rest(spec: Model) -> None:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this PyTorch has no Muon")
    # PyTorch's takes no stacks of matrices, nor those of a convolution
    stacked = MixtureOfExperts | RGLRU | CausalConvolution | CentredConvolution | ProjectedStreams
    assume(not any(isinstance(part, stacked) for _, part in walk(spec)))
    model, found = stepped(spec, torch.float32), state(spec, "muon", "fp32").optimizer
    chosen = {path for path, weight, owner in weights(spec) if orthogonal(weight, owner.kind)}
    named = dict(model.named_parameters())
    assert all(named[path].ndim == 2 for path in chosen)
    muon = torch.optim.Muon([named[path] for path in chosen]) if chosen else None
    adamw = torch.optim.AdamW([p for path, p in named.items() if path not in chosen])
    optimizers = [optimizer for optimizer in (muon, adamw) if optimizer is not None]
    for optimizer in optimizers:
        optimizer.step()
    assert found.get("momentum", 0) == kept(optimizers, "momentum_buffer")
    assert found.get("first moment", 0) == kept(optimizers, "exp_avg")
    assert found.get("second moment", 0) == kept(optimizers, "exp_avg_sq")


@given(SPECS, st.integers(1, 4))
@settings(max_examples=12)
def test_adapters_are_two_linear_maps_beside_each_matrix(spec: Model, rank: int) -> None:
    """Counted on the built model: for (…, out, in) a map in -> rank and one rank -> out, of each matrix of a stack."""
    model = build(without_predictors(spec), device="meta")
    adapters = [
        nn.ModuleList([nn.Linear(w.shape[-1], rank, bias=False), nn.Linear(rank, w.shape[-2], bias=False)])
        for path, w in model.named_parameters()
        if w.ndim > 1
        and path.startswith("blocks.")
        # filters of each channel and rates of a recurrence are no matrices; what is by heads or groups is no linear map
        and not any(part in path for part in ("router", "positions", "bias", "conv.weight", "a_log", "streams."))
        and not path.endswith(("_gate", "o_down", ".hidden", ".taps", ".a_im", ".c_re", ".c_im"))
        and not path.endswith((".prediction", ".correction", "norm.weight", ".bonus"))
        for _ in range(w[..., 0, 0].numel())
    ]
    try:
        found = state(spec, "adamw", "fp32", lora=rank)
    except InputError:  # of a map that is narrower than the rank
        return
    trained = sum(p.numel() for adapter in adapters for p in adapter.parameters())
    assert found.gradients == 4 * trained
    assert found.weights == nbytes(model.parameters()) + 4 * trained
    assert sum(found.optimizer.values()) == 8 * trained


@given(st.integers(1, 10**5))
def test_nf4_counts_its_blocks(size: int) -> None:
    """Two numbers a byte, then one scale for each chunk, quantised once more: by cutting, not by arithmetic."""
    numbers = torch.empty(size, device="meta")
    scales = sum(1 for _ in numbers.split(64))
    again = sum(1 for _ in torch.empty(scales, device="meta").split(256))
    assert nf4_bytes(size) == (size + 1) // 2 + scales + 4 * again
    assert 0 <= nf4_bytes(size) - size * (1 / 2 + 1 / 64 + 4 / 64 / 256) <= 8


@pytest.mark.parametrize("size", [1, EIGHT_BIT_LEAST - 1, EIGHT_BIT_LEAST, 10**5 + 1])
def test_eight_bit_moments(size: int) -> None:
    found = train(None, H100, parameters=size, optimizer="adamw-8bit").state.optimizer["first moment"]
    blocks = len(torch.empty(size, device="meta").split(EIGHT_BIT_BLOCK))
    assert found == (4 * size if size < EIGHT_BIT_LEAST else size + 4 * blocks)


SEQ = 128


def small(n_vocab: int, n_layers: int, d_ff: int) -> Model:
    return llama.build(
        n_vocab=n_vocab,
        d_model=128,
        n_layers=n_layers,
        n_heads=4,
        n_kv_heads=2,
        d_ff=d_ff,
        max_positions=SEQ,
        rotary=Rotary(d_rotary=32),
        tied=False,
        name="small",
    )


def backward_peak(model: Built, tokens: Tensor, *, again: bool) -> int:
    """Most bytes of one forward and backward pass beyond weights and gradients; blocks run again where `again`."""

    def step() -> None:
        if again:
            begun = model.begin((len(tokens), tokens.shape[1]), tokens.device, None, None, "fused")
            x = model.embedding(tokens, begun)
            for block in model.blocks:
                x = checkpoint(block, x, begun, use_reentrant=False, preserve_rng_state=False)
            assert model.norm is not None and model.head is not None  # noqa: PT018
            x = model.norm(x)
            logits = model.head(x, model.embedding.weight)
            del x
        else:
            logits = model(tokens)
        wide = logits.float().flatten(0, 1)
        del logits
        loss = F.cross_entropy(wide, tokens.flatten())
        del wide
        loss.backward()

    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    step()
    return peak_bytes(step)


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize(("n_vocab", "n_layers", "d_ff", "batch"), [(2048, 4, 350, 2), (3000, 2, 700, 3)])
def test_peak_where_the_loss_is_largest(
    dtype: str, checkpointing: str, n_vocab: int, n_layers: int, d_ff: int, batch: int
) -> None:
    """Activations and the loss are what PyTorch's allocator gives out, to a hundredth."""
    spec = small(n_vocab, n_layers, d_ff)
    plan = train(spec, H100, dtype=dtype, seq=SEQ, batch=batch, checkpointing=checkpointing, master=False)
    stage = plan.trial.fullest
    assert stage.loss_peak > stage.recompute_peak
    tokens = torch.randint(n_vocab, (batch, SEQ), generator=torch.Generator().manual_seed(0))
    measured = backward_peak(build(spec, dtype=DTYPES[dtype], seed=0), tokens, again=checkpointing == "full")
    assert plan.per_device_bytes - plan.state.total == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_peak_where_a_block_is_largest(dtype: str, checkpointing: str) -> None:
    """What a block's parts declare to need in training is what PyTorch's allocator gives out, to a hundredth."""
    spec = small(32, 4, 350)
    plan = train(spec, H100, dtype=dtype, seq=SEQ, batch=2, checkpointing=checkpointing, master=False)
    stage = plan.trial.fullest
    assert stage.recompute_peak > stage.loss_peak
    tokens = torch.randint(32, (2, SEQ), generator=torch.Generator().manual_seed(0))
    measured = backward_peak(build(spec, dtype=DTYPES[dtype], seed=0), tokens, again=checkpointing == "full")
    assert plan.per_device_bytes - plan.state.total == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("tied", [True, False])
def test_peak_where_the_heads_gradient_is_largest(tied: bool) -> None:
    """Few tokens of a large vocabulary: three gradients of a tied table at once, one new one of a head of its own."""
    spec = llama.build(
        n_vocab=6000,
        d_model=128,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        d_ff=350,
        max_positions=SEQ,
        rotary=Rotary(d_rotary=32),
        tied=tied,
        name="wide",
    )
    plan = train(spec, H100, dtype="fp32", seq=16, batch=1)
    stage = plan.trial.fullest
    assert stage.gradient_peak > max(stage.loss_peak, stage.recompute_peak)
    measured = backward_peak(build(spec, seed=0), torch.arange(16)[None], again=False)
    assert plan.per_device_bytes - plan.state.total == pytest.approx(measured, rel=0.01)
