"""The ernie4_5_moe family: ernie4_5's attention, and experts chosen by corrected softmax beside shared ones.

ERNIE Team, Baidu 2025 (technical report of ERNIE 4.5, and its model cards).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from asbuilt.families import llama
from asbuilt.families.ernie4_5 import EPS
from asbuilt.families.shared import experts
from asbuilt.families.shared.key import Irrelevant, Number, Only, Size, Values, but
from asbuilt.families.shared.names import EXPERTS, NO_BUFFERS, ROUTER, SHARED_EXPERTS, STEMS, Names
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.families.shared.sizes import sizes
from asbuilt.families.shared.table import Leading

CORRECTION = "ffn.body.router.correction"


class _Layers:
    """Which layers have experts: of those from `start` to `end` every `interval`-th; -1 is the last."""

    start, end, interval = "moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the layers that have none; raises InputError where none has experts."""
        n_layers = values["n_layers"]
        start, interval = reader.size(self.start, default=1, least=0), reader.size(self.interval, default=1)
        said = reader.size(self.end, default=-1, least=-1)
        for key in (self.start, self.end, self.interval):
            reader.irrelevant(key, "carried, since several ways of saying it are the same")
        values["dense"] = self._dense(n_layers, start, said, interval)
        reader.require(self.start, len(values["dense"]) < n_layers, "such that some layer has experts")

    @staticmethod
    def _dense(n_layers: int, start: int, end: int, interval: int) -> frozenset[int]:
        last = n_layers - 1 if end == -1 else end
        return frozenset(i for i in range(n_layers) if (i + 1) % interval or not start <= i <= last)

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the keys that were carried, if they mean these layers, or others."""
        sparse: Collection[int] = [i for i, _ in experts.sparse_layers(parts.model)]
        carried = [
            parts.carried.get(key, usual) for key, usual in ((self.start, 1), (self.end, -1), (self.interval, 1))
        ]
        if self._dense(parts.n_layers, *carried) == frozenset(range(parts.n_layers)) - frozenset(sparse):
            return {key: parts.carried[key] for key in (self.start, self.end, self.interval) if key in parts.carried}
        interval = sparse[1] - sparse[0] if len(sparse) > 1 else 1
        return {self.start: sparse[0], self.end: sparse[-1], self.interval: interval}


FAMILY = replace(
    llama.FAMILY,
    name="ernie4_5_moe",
    heads=("Ernie4_5_MoeForCausalLM",),
    keys=(  # defaults as in transformers' Ernie4_5_MoeConfig
        *but(
            sizes(n_vocab=103424, d_model=2560, d_ff=12288, n_layers=28, n_heads=20, n_kv_heads=4, context=131072),
            rotary={"theta": 500_000.0},
            tied={"default": True},
            d_ff=experts.dense,
        ),
        EPS,
        Only("use_bias", False, None, reason="biases beside experts are not supported"),
        Irrelevant("training only", "moe_capacity"),
        experts.routed(
            *but(
                experts.counts("moe_num_experts", "num_experts", "num_local_experts", n_experts=64, top_k=6),
                top_k={"key": "moe_k", "also": ("num_experts_per_tok",)},
            ),
            # the sum is held to this much at least, which a sum of softmax scores always is
            Number("moe_norm_min", "eps", default=1e-12, most=1e-6, at="mixture.router.eps"),
            Only("moe_gate", "topk", reason="the best experts are taken"),
            Only("moe_gate_act", "softmax", reason="this family scores by softmax"),
            Only("moe_use_aux_free", True, None, reason="scores of this family are always corrected for the choice"),
            renormalise=True,
            correction=True,
        ),
        experts.expert_width(1536),
        Size("moe_num_shared_experts", "n_shared", default=2, least=0, at=lambda parts: experts.shared_of(parts) or 0),
        _Layers(),
        Irrelevant("prediction layers, which are not built", "num_nextn_predict_layers"),
    ),
    build=lambda n_shared, **values: llama.build(adjacent=True, n_shared=n_shared or None, **values),
    names=Names(
        stems=STEMS | ROUTER | SHARED_EXPERTS | {CORRECTION: "mlp.moe_statics.e_score_correction_bias"},
        experts=EXPERTS,
        layouts={CORRECTION: Leading(1)},
        ignored=NO_BUFFERS | {r"model\.mtp_.*": "prediction layers, which are not built"},
    ),
)
