"""The mLSTM, with a sequence's memories and stabilisers in the cache.

Shapes: batch B, new tokens T, model width M, heads H, key width K, value width V, width of all heads W, heads of all
rows G = B*H.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from asbuilt.kernels.matrix_lstm import State, Tokens, by_chunks
from asbuilt.kernels.recompute import recomputed
from asbuilt.nn.cache import StateCache
from asbuilt.nn.linear import Linear, PartModule
from asbuilt.nn.registry import computes, module
from asbuilt.nn.step import Step
from asbuilt.spec import mamba2
from asbuilt.spec import matrix_lstm as spec


@computes(spec.MatrixLSTM)
class MatrixLSTM(PartModule):
    """o(sigmoid(gate x) * norm(C^T q / max(|n^T q|, 1)))."""

    q: Linear
    k: Linear
    v: Linear
    gate: Linear
    input_gate: Linear
    forget_gate: Linear
    o: Linear

    def __init__(self, part: spec.MatrixLSTM, path: str) -> None:
        super().__init__(part, path)
        self.part = part
        self.norm = module(part.norm, f"{path}.norm")
        self.inward = self.fused(*(self.get_submodule(name) for name in part.maps if name != "o"))  # type: ignore[arg-type]

    def forward(self, x_BTM: Tensor, step: Step) -> Tensor:
        """Returns (B, T, M)."""
        q, k, v, gate, write, forget = self.inward(x_BTM)
        layer = None if step.cache is None else step.cache.layer(self.path, StateCache)
        if layer is None:
            y = recomputed(partial(self.read, step=step, layer=None), q, k, v, write, forget)
        else:
            y = self.read(q, k, v, write, forget, step=step, layer=layer)
        return self.o(self.norm(y).flatten(2) * torch.sigmoid(gate))

    def read(
        self,
        q_BTW: Tensor,
        k_BTW: Tensor,
        v_BTW: Tensor,
        write_BTH: Tensor,
        forget_BTH: Tensor,
        *,
        step: Step,
        layer: StateCache | None,
    ) -> Tensor:
        """Returns what the queries read (B, T, H, V), and stores the state after the last token."""
        part, (B, T, _) = self.part, q_BTW.shape
        write, forget = self.gates(write_BTH, forget_BTH, step.valid_BT)
        q, k, v = (self.by_head(x) for x in (q_BTW, k_BTW, v_BTW))
        tokens = Tokens(q * part.d_key**-0.5, k, F.pad(v, (0, 1), value=1.0), write, forget)
        del q, v  # freed, if autograd does not need them
        before = None
        if layer is not None and any(step.past):
            before = State(*(tensor.flatten(0, 1) for tensor in layer.read()))
        y, after = by_chunks(tokens, before, part.eps, mamba2.CHUNK, keep=layer is not None)
        if layer is not None:
            layer.write(tuple(tensor.unflatten(0, (B, part.n_heads)) for tensor in after))
        return y.view(B, part.n_heads, T, -1).transpose(1, 2).to(q_BTW.dtype)

    def by_head(self, x_BTW: Tensor) -> Tensor:
        """Returns the numbers of each head (G, T, D), in float32 or wider."""
        wide = torch.promote_types(x_BTW.dtype, torch.float32)
        x = x_BTW.unflatten(-1, (self.part.n_heads, -1)).transpose(1, 2)
        return x.to(wide, memory_format=torch.contiguous_format).flatten(0, 1)

    def gates(self, write_BTH: Tensor, forget_BTH: Tensor, valid_BT: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns log i and log f of each head (G, T): padding writes nothing, and nothing is forgotten meanwhile."""
        write, forget = (self.capped(self.by_head(x).squeeze(-1)) for x in (write_BTH, forget_BTH))
        forget = F.logsigmoid(forget)
        if valid_BT is not None:
            valid_GT = valid_BT.repeat_interleave(self.part.n_heads, 0)
            write, forget = write.masked_fill(~valid_GT, -torch.inf), forget * valid_GT
        return write, forget

    def capped(self, gates: Tensor) -> Tensor:
        """Returns c * tanh(gates / c)."""
        return self.part.cap * torch.tanh(gates / self.part.cap)
