"""Training plans of small models, worked out by hand: each degree alone and together, every figure a literal.

The machine does 10^12 FLOP/s, of which kernels reach half, and moves 10^12 bytes/s of its memory. Two GPUs share a link
of 100 GB/s, nodes one of 10 GB/s, the host is 5 GB/s away. A micro-batch is 2 sequences of 32 tokens: 64 rows.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from formulas import every_section

from asbuilt.catalog.machine import Link, Machine
from asbuilt.errors import InputError
from asbuilt.families import gpt2, llama, mixtral
from asbuilt.plan import Options, Subject
from asbuilt.plan.network import Network, ring
from asbuilt.plan.placement import arrange, divisors
from asbuilt.plan.train.moments import moments
from asbuilt.plan.train.plan import plan
from asbuilt.plan.train.report import document
from asbuilt.plan.train.stages import StageMemory
from asbuilt.spec import Lora, Model, Rotary

MACHINE = Machine(
    name="hand",
    memory_gb=1,
    bandwidth=1e12,
    rates={"bf16": 1e12},
    link=Link(kind="wire", bandwidth=100e9),
    source="made up",
)
BASE: dict[str, Any] = {"batch": 2, "seq": 32, "kernel_efficiency": 0.5, "node": 2, "network": 10e9, "host": 5e9}

# A block: q and o 64 x 64, k and v 32 x 64: 12,288. gate, up and down 96 x 64: 18,432. Two norms of 64. 30,848 in all.
# Four of them 123,392; the table 64,000, the final norm 64, the head 64,000: 251,456 parameters.
DENSE = llama.build(
    n_vocab=1000,
    d_model=64,
    n_layers=4,
    n_heads=4,
    n_kv_heads=2,
    d_ff=96,
    max_positions=32,
    rotary=Rotary(d_rotary=16),
    name="dense",
)
# The same with 4 experts of which a token uses 2, a router of 256, and windows of 8 tokens:
# dense 251,456 - 4 x 18,432 + 4 x 256 = 178,752, experts 4 x 4 x 18,432 = 294,912: 473,664 parameters.
SPARSE = mixtral.FAMILY.read(
    {
        "model_type": "mixtral",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 1000,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "max_position_embeddings": 32,
        "tie_word_embeddings": False,
    },
    "sparse",
).spec
# GPT-2's: q, k, v, o 4 x (64 x 64 + 64), up and down 2 x 64 x 256 + 256 + 64, two norms of 128: 49,984. Four of them
# 199,936; the table 64,000, positions 2,048, the final norm 128; the head is the table: 266,112 parameters.
TIED = gpt2.build(n_vocab=1000, d_model=64, n_layers=4, n_heads=4, max_positions=32, name="tied")

# FLOPs of the dense model's block, forward: 64 rows x 2 x (12,288 + 18,432) = 3,932,160; scores and their mixing
# 2 x 2 x 16 wide x 4 heads x 2 sequences x 32 x 33 / 2 pairs = 270,336: 4,202,496. The head 64 x 2 x 64,000 =
# 8,192,000. Forward 4 x 4,202,496 + 8,192,000 = 25,001,984, with the backward pass three times that: 75,005,952.
# With full scores, 32 x 32 pairs: 2 x 2 x 16 x 4 x 2 x 1,024 = 524,288 a block, 1,015,808 more in all: 78,053,376.
#
# Bytes that a block saves of 64 rows: inputs of both norms and of both mixers 4 x 4,096, q 4,096, mixed values 4,096,
# k and v 2,048 each; gate, activated gate, up and their product 4 x 6,144: 53,248 numbers of 2 bytes; two reciprocal
# deviations a row and a log-sum-exp for each head, 384 numbers of 4 bytes: 108,032. Selective leaves out both mixers'
# inputs, the activated gate and the product: 2 x 4,096 + 2 x 6,144 = 20,480 numbers: 67,072 are left.
# Outside: inputs of final norm and head 2 x 8,192, its deviations 256, token numbers 64 x 8, cosines and sines
# 2 x 32 x 16 x 2: 19,200. Logits 64 x 1,000 x 4 = 256,000; three of them for the loss: 768,000.
ONE = {
    "state_bytes.weights": 502_912,  # 2 x 251,456
    "state_bytes.gradients": 502_912,
    "state_bytes.master": 1_005_824,  # 4 x 251,456
    "state_bytes.optimizer": 2_011_648,  # 8 x 251,456
    "state_bytes.total": 4_023_296,
    "activation_bytes": 432_128,  # 4 x 108,032
    "logits_bytes": 256_000,
    "per_device_bytes": 5_242_624,  # 4,023,296 + 432,128 + 19,200 + 768,000
    "host_bytes": 0,
    "memory_bytes": 1_000_000_000,
    "reserve_bytes": 50_000_000,
    "flops_per_token.6ND": 1_508_736,  # 6 x 251,456
    "flops_per_token.exact": 78_053_376 / 64,
    "flops_per_token.exact_causal": 75_005_952 / 64,
    "step.tokens": 64,
    "step.compute_seconds": 150.011904e-6,  # 75,005,952 / 0.5e12
    "step.optimizer_seconds": 7.040768e-6,  # 28 bytes a parameter: 2 + 2 and twice 4 + 4 + 4
    "step.seconds": 157.052672e-6,
    "step.bubble": 0,
    "step.mfu.6ND": 96_559_104 / 157.052672e6,  # 64 x 1,508,736, in 1e12 x the seconds
    "step.mfu.exact": 78_053_376 / 157.052672e6,
    "step.mfu.exact_causal": 75_005_952 / 157.052672e6,
    "communication.data.bytes": 0,
    "communication.tensor.bytes": 0,
    "communication.pipeline.bytes": 0,
    "communication.context.bytes": 0,
    "communication.expert.bytes": 0,
    "communication.offload.bytes": 0,
}

CASES: dict[str, tuple[Model, dict[str, Any], dict[str, float]]] = {
    "alone": (DENSE, {}, ONE),
    # q (64 x 64) and v (32 x 64) of each block frozen, with A (4 x 64 each) and B (64 x 4, 32 x 4) beside them: 896
    # numbers a block more, 6,144 that are not trained: 230,464 of 255,040 parameters are.
    "adapters in the spec": (
        DENSE.replace_where(
            lambda path, part: path.endswith((".q", ".v")),
            lambda part: Lora(base=part, rank=4, alpha=8.0),  # type: ignore[arg-type]  # pyright: ignore
        ),
        {},
        {
            "state_bytes.weights": 510_080,
            "state_bytes.gradients": 460_928,
            "state_bytes.master": 921_856,
            "state_bytes.optimizer": 1_843_712,
            # 64 rows by A and B of both maps, 256 + 256 + 256 + 128 numbers, forward and twice backward;
            # the products with q and v need one gradient less: 64 x 2 x 6,144 in each block
            "flops_per_token.exact_causal": (75_005_952 + 4 * (3 * 64 * 2 * 896 - 64 * 2 * 6_144)) / 64,
            # what B reads, 4 numbers a row for each of two maps, in 2 bytes
            "activation_bytes": 432_128 + 4 * 2 * 64 * 4 * 2,
        },
    ),
    "data parallel, ZeRO-0": (
        DENSE,
        {"gpus": 2, "accumulate": 4},
        {
            "per_device_bytes": 5_242_624,
            "communication.data.bytes": 502_912,  # 2 (n-1)/n = 1 of the gradients, once a step
            "communication.data.seconds": 5.02912e-6,  # within a node of two
            "step.waiting_for_data_seconds": 0,  # 2/3 of 150 us hide it
            "step.optimizer_seconds": 7.040768e-6,
            "step.seconds": 607.088384e-6,  # 4 x 150.011904 + 7.040768
            "step.tokens": 512,
        },
    ),
    "ZeRO-1": (
        DENSE,
        {"gpus": 2, "accumulate": 4, "zero": 1},
        {
            "state_bytes.weights": 502_912,
            "state_bytes.gradients": 502_912,
            "state_bytes.master": 502_912,
            "state_bytes.optimizer": 1_005_824,  # halves
            "per_device_bytes": 3_733_888,  # 5,242,624 - 1,508,736
            "communication.data.bytes": 502_912,  # half of gradients and weights
            "step.optimizer_seconds": 3.520384e-6,
            "step.seconds": 603.568e-6,
        },
    ),
    "ZeRO-2": (
        DENSE,
        {"gpus": 2, "accumulate": 4, "zero": 2},
        {
            "state_bytes.gradients": 251_456,
            # while the head's 128,128 bytes of gradients (and the norm's) wait to be scattered: half of them more
            "per_device_bytes": 3_546_496,  # 3,733,888 - 251,456 + 64,064
            "communication.data.bytes": 1_257_280,  # half of 4 x gradients and the weights
        },
    ),
    "ZeRO-3": (
        DENSE,
        {"gpus": 2, "accumulate": 4, "zero": 3},
        {
            "state_bytes.weights": 251_456,
            # beside half of the state, 2,011,648, the loss has a copy of what is outside the blocks, 256,128
            "per_device_bytes": 3_487_104,  # 2,011,648 + 256,128 + 432,128 + 19,200 + 768,000
            # a micro-batch gathers 1,005,824 - 256,128 and scatters 502,912: half of 4 x 1,252,608
            "communication.data.bytes": 2_505_216,
            "communication.data.seconds": 25.05216e-6,
        },
    ),
    "ZeRO-3 over two nodes": (
        DENSE,
        {"gpus": 4, "accumulate": 4, "zero": 3},
        {
            "state_bytes.weights": 125_728,
            "communication.data.bytes": 3_757_824,  # 3/4 of 4 x 1,252,608
            "communication.data.seconds": 375.7824e-6,  # at the nodes' 10 GB/s
            "step.waiting_for_data_seconds": 0,  # four micro-batches take 600 us
        },
    ),
    "one micro-batch of ZeRO-3 over two nodes, a slow network": (
        DENSE,
        {"gpus": 4, "accumulate": 1, "zero": 3, "network": 1e9},
        {
            "communication.data.seconds": 939.456e-6,  # 3/4 of 1,252,608, at 1 GB/s
            "step.waiting_for_data_seconds": 789.444096e-6,  # less 150.011904
            "step.seconds": 941.216192e-6,  # 939.456 + a quarter of 7.040768
        },
    ),
    "one micro-batch of ZeRO-1 over two nodes, a slow network": (
        DENSE,
        {"gpus": 4, "accumulate": 1, "zero": 1, "network": 1e9},
        {
            "communication.data.seconds": 754.368e-6,  # 3/4 of 1,005,824
            "step.waiting_for_data_seconds": 654.360064e-6,  # less two thirds of 150.011904
        },
    ),
    # Two devices: matrices, table and head in halves, norms whole: 4 x (15,360 + 128) + 64,064 = 126,016 parameters
    "tensor parallel": (
        DENSE,
        {"gpus": 2, "tp": 2},
        {
            "state_bytes.weights": 252_032,
            "activation_bytes": 216_064,  # by heads and columns, or by tokens: half of all
            "logits_bytes": 128_000,
            "per_device_bytes": 2_627_200,  # 16 x 126,016 + 216,064 + 10,880 outside + 3 x 128,000
            "step.compute_seconds": 75.005952e-6,
            # 8,192 bytes of the stream, 2 (n-1)/n = 1 of it, 18 times: 8 branches forward and backward, table,
            # head; and 3 x 64 numbers of 4 bytes of the loss
            "communication.tensor.bytes": 148_224,
            "communication.tensor.seconds": 1.48224e-6,
            "step.optimizer_seconds": 3.528448e-6,  # 28 x 126,016
            "step.seconds": 80.01664e-6,
        },
    ),
    "tensor parallel, whole tokens": (
        DENSE,
        {"gpus": 2, "tp": 2, "sequence_parallel": False},
        {
            # whole: inputs of norms and mixers 4 x 8,192 and deviations 512; halves: (108,032 - 33,280) / 2 = 37,376
            "activation_bytes": 282_624,  # 4 x (33,280 + 37,376)
            "communication.tensor.bytes": 148_224,
            "step.compute_seconds": 75.005952e-6,
        },
    ),
    "tensor parallel, blocks run again": (
        DENSE,
        {"gpus": 2, "tp": 2, "checkpointing": "full"},
        {
            "activation_bytes": 16_384,  # half of each block's input, 4 x 8,192
            # 8 branches forward and backward, the first of 4 blocks again, table and head: 22 x 8,192; and 768
            "communication.tensor.bytes": 180_992,
            "step.compute_seconds": 91.815936e-6,  # (75,005,952 + 4 x 4,202,496) / 2
        },
    ),
    "selective": (
        DENSE,
        {"checkpointing": "selective"},
        {
            "activation_bytes": 268_288,  # 4 x 67,072
            "step.compute_seconds": 150.011904e-6,
        },
    ),
    "blocks run again": (
        DENSE,
        {"checkpointing": "full"},
        {
            "activation_bytes": 32_768,
            "per_device_bytes": 4_843_264,  # 5,242,624 - 432,128 + 32,768: the loss still needs the most room
            "step.compute_seconds": 183.631872e-6,
            "step.mfu.exact_causal": 75_005_952 / 190.67264e6,  # what is run again counts for nothing
        },
    ),
    # Two stages of two blocks. The last has 61,696 + 64 + 64,000 = 125,760 parameters, the first 125,696.
    "pipeline, 1F1B": (
        DENSE,
        {"gpus": 2, "pp": 2, "accumulate": 4, "interleave": 1},
        {
            "stage.fullest": 1,  # for its loss
            "stage.micro_batches_in_flight": 1,
            "state_bytes.weights": 251_520,
            "activation_bytes": 216_064,
            "step.compute_seconds": 398.327808e-6,  # the last: 4 x 3 x (2 x 4,202,496 + 8,192,000) / 0.5e12
            "communication.pipeline.bytes": 32_768,  # 8,192 there, or back, four times
            "communication.pipeline.seconds": 0.32768e-6,
            "step.bubble": 0.2,  # 1 of 4 + 1
            "step.breakdown_seconds.bubble": 99.663872e-6,  # (398.327808 + 0.32768) / 4
            "step.seconds": 501.84064e-6,  # 398.327808 + 0.32768 + 99.663872 + 28 x 125,760 bytes
        },
    ),
    "pipeline, interleaved": (
        DENSE,
        {"gpus": 2, "pp": 2, "accumulate": 4},
        {
            "step.chunks_of_a_stage": 2,
            "stage.micro_batches_in_flight": 1.5,  # 3 chunks of one block: 2 x 1 - 1 + (2 - 1) x 2
            "activation_bytes": 324_096,
            # two chunks there and back, but for the first there is no way back, and none on for the last
            "communication.pipeline.bytes": 98_304,  # 3 x 8,192, four times
            "step.bubble": 1 / 9,
            "step.breakdown_seconds.bubble": 49.913856e-6,  # (398.327808 + 0.98304) / 8
            "step.seconds": 452.745984e-6,
        },
    ),
    "pipeline, too few micro-batches to interleave": (
        DENSE,
        {"gpus": 2, "pp": 2, "accumulate": 3},
        {
            "step.chunks_of_a_stage": 1,
            "step.bubble": 0.25,
        },
    ),
    # Blocks of 49,984: the last stage has 2 of them, the norm and the table once more: 164,096 parameters.
    "pipeline of a tied table": (
        TIED,
        {"gpus": 2, "pp": 2, "accumulate": 3},
        {
            "state_bytes.weights": 328_192,
            # the stream there, or back, three times, and the table's gradient, 2 x 64,000
            "communication.pipeline.bytes": 152_576,
            "communication.pipeline.seconds": 1.52576e-6,
        },
    ),
    "a tied table on one device": (
        TIED,
        {},
        {
            "state_bytes.weights": 532_224,
            # a block, forward: 64 x 2 x 49,152 and scores of 4 heads 270,336: 6,561,792; the head as above
            "step.compute_seconds": 206.635008e-6,  # 3 x (4 x 6,561,792 + 8,192,000) / 0.5e12
        },
    ),
    "context parallel": (
        DENSE,
        {"gpus": 2, "cp": 2},
        {
            "state_bytes.weights": 502_912,
            "activation_bytes": 216_064,
            "logits_bytes": 128_000,
            "step.compute_seconds": 75.005952e-6,
            # the other's k and v, 16 tokens x 2 sequences x 64 numbers x 2 bytes = 4,096, of 4 blocks, three times
            "communication.context.bytes": 49_152,
            "communication.context.seconds": 0.49152e-6,
            "communication.data.bytes": 502_912,  # both ranks have the same weights
            "step.seconds": 82.04672e-6,  # the ring is hidden
        },
    ),
    "a ring that is slower than computing": (
        DENSE,
        {"gpus": 4, "cp": 4, "network": 1e8, "zero": 1},
        {
            # the others' 24 tokens x 2 x 64 x 2 bytes = 6,144, of 4 blocks, three times
            "communication.context.bytes": 73_728,
            "communication.context.seconds": 737.28e-6,
            "step.breakdown_seconds.context": 699.777024e-6,  # less 150.011904 / 4
            "step.breakdown_seconds.computing": 37.502976e-6,
            "state_bytes.master": 251_456,  # ZeRO's ranks are those of the context too
        },
    ),
    "a slow ring, twice": (
        DENSE,
        {"gpus": 4, "cp": 4, "network": 1e8, "zero": 1, "accumulate": 2},
        {
            "communication.context.seconds": 1_474.56e-6,
            "step.breakdown_seconds.context": 1_399.554048e-6,
            "step.breakdown_seconds.computing": 75.005952e-6,
        },
    ),
    "context parallel with windows, blocks run again": (
        SPARSE,
        {"gpus": 2, "cp": 2, "checkpointing": "full"},
        {
            # of the other's 16 tokens a window reaches 8: 2,048 bytes of 4 blocks, forward, again, and twice backward
            "communication.context.bytes": 32_768,
        },
    ),
    "context parallel, gathered": (
        DENSE,
        {"gpus": 4, "cp": 4, "network": 1e8, "zero": 1, "gather_context": True},
        {
            # the others' 6,144 bytes of 4 blocks, gathered once; their gradients scattered once
            "communication.context.bytes": 49_152,
            "communication.context.seconds": 491.52e-6,
            "step.breakdown_seconds.context": 491.52e-6,  # nothing hides it
            "step.breakdown_seconds.computing": 37.502976e-6,
        },
    ),
    "context parallel with windows, gathered, blocks run again": (
        SPARSE,
        {"gpus": 2, "cp": 2, "checkpointing": "full", "gather_context": True},
        {
            # all of the other's 16 tokens, whatever the window: 4,096 bytes of 4 blocks, gathered twice, scattered once
            "communication.context.bytes": 49_152,
        },
    ),
    # A block, forward: 64 x 2 x (12,288 + 256) = 1,605,632; two experts a token 64 x 2 x 2 x 18,432 = 4,718,592;
    # scores of 36 + 24 x 8 = 228 pairs 2 x 2 x 16 x 4 x 2 x 228 = 116,736: 6,440,960.
    # In all 3 x (4 x 6,440,960 + 8,192,000) = 101,867,520.
    "experts on one device": (
        SPARSE,
        {},
        {
            "state_bytes.weights": 947_328,
            "step.compute_seconds": 203.73504e-6,
            "flops_per_token.6ND": 1_957_248,  # 6 x (178,752 + half of 294,912)
        },
    ),
    "expert parallel": (
        SPARSE,
        {"gpus": 2, "ep": 2, "accumulate": 2},
        {
            "state_bytes.weights": 652_416,  # 2 x (178,752 + 147,456)
            "communication.data.bytes": 357_504,  # the experts' gradients are nobody else's
            # 128 rows of 64 numbers, half of them to the other and back: 16,384 bytes; 4 blocks, both passes, twice
            "communication.expert.bytes": 262_144,
            "communication.expert.seconds": 2.62144e-6,
            "step.breakdown_seconds.expert": 2.62144e-6,
        },
    ),
    "expert parallel, ZeRO-3": (
        SPARSE,
        {"gpus": 4, "ep": 2, "zero": 3, "accumulate": 2},
        {
            "state_bytes.weights": 236_832,  # a quarter of 357,504 and half of 294,912
            # dense 3/4 x 2 x (2 x 357,504 - 256,128 + 357,504), experts 1/2 x 2 x 3 x 294,912
            "communication.data.bytes": 2_109_312,
            "communication.data.seconds": 210.9312e-6,  # both rings leave the node
        },
    ),
    # The last stage: dense 2 x 25,344 + 128 + 128,000 = 178,816 bytes of gradients, 2 x 3/4 of them; experts 147,456,
    # of which two ranks that stand two apart, in one node of four, have the same.
    "expert parallel in two stages": (
        SPARSE,
        {"gpus": 8, "pp": 2, "ep": 2, "accumulate": 2, "node": 4},
        {
            "communication.data.bytes": 415_680,
            "communication.data.seconds": 4.1568e-6,
        },
    ),
    # Rank 4 beside every matrix of a block: 4 x (64+64 + 2 x (64+32) + 64+64 + 3 x (64+96)) = 3,712; 14,848 in all.
    "adapters": (
        DENSE,
        {"lora": 4},
        {
            "state_bytes.weights": 532_608,  # 502,912 + 2 x 14,848
            "state_bytes.gradients": 29_696,
            "state_bytes.master": 59_392,
            "state_bytes.optimizer": 118_784,
            # B reads 7 x 4 numbers a row: 64 x 28 x 2 bytes of 4 blocks more
            "activation_bytes": 446_464,
            # frozen products twice, scores and adapters (64 x 2 x 3,712 a block) three times:
            # 2 x (4 x 3,932,160 + 8,192,000) + 3 x 4 x (270,336 + 475,136)
            "step.compute_seconds": 113.573888e-6,
            "flops_per_token.exact_causal": 56_786_944 / 64,
            "step.optimizer_seconds": 0.415744e-6,  # 28 x 14,848
        },
    ),
    "adapters of q and v": (
        DENSE,
        {"lora": 4, "targets": ("q", "v")},
        {
            "state_bytes.gradients": 7_168,  # 2 x 4 blocks x 4 x (128 + 96)
            "step.compute_seconds": 104.923136e-6,
        },
    ),
    # NF4 of 64 x 64: 2,048 + 64 scales + 4; 64 x 32: 1,024 + 32 + 4; 64 x 96: 3,072 + 96 + 4. A block 2 x 2,116 +
    # 2 x 1,060 + 3 x 3,172 = 15,868; its norms 256 bytes. Table, norm and head 256,128; adapters 29,696.
    "adapters over NF4": (
        DENSE,
        {"lora": 4, "qlora": True},
        {
            "state_bytes.weights": 350_320,
            "step.compute_seconds": 113.573888e-6,
        },
    ),
    "adapters, offloaded": (
        DENSE,
        {"lora": 4, "offload": "optimizer"},
        {
            "communication.offload.bytes": 59_392,  # 14,848 gradients there, as many weights back; nothing frozen
            "host_bytes": 178_176,
        },
    ),
    "offloaded": (
        DENSE,
        {"offload": "all", "accumulate": 2},
        {
            "host_bytes": 3_449_600,  # 12 x 251,456 + 432,128
            "per_device_bytes": 1_793_024,  # 5,242,624 less that
            # gradients there and weights back, and saved tensors both ways, twice: 1,005,824 + 4 x 432,128
            "communication.offload.bytes": 2_734_336,
            "communication.offload.seconds": 546.8672e-6,
            "step.optimizer_seconds": 0,
            "step.seconds": 846.891008e-6,  # 300.023808 + 546.8672
        },
    ),
    "offloaded, ZeRO-1": (
        DENSE,
        {"offload": "optimizer", "gpus": 2, "zero": 1},
        {
            "communication.offload.bytes": 502_912,  # a rank updates its half
            "host_bytes": 1_508_736,
        },
    ),
    "the loss in 8 pieces": (
        DENSE,
        {"chunked_loss": 8},
        {
            "logits_bytes": 32_000,
            # the head's gradient needs the most room now: 2 x 64,064 and the logits' 16,000
            "per_device_bytes": 4_618_752,  # 4,023,296 + 432,128 + 19,200 + 144,128
        },
    ),
    # 2 x 2 x 2 x 2: blocks of 15,488, the last stage 2 x 15,488 + 64 + 32,000 = 63,040; 16 tokens of a sequence here.
    "together": (
        DENSE,
        {"gpus": 16, "tp": 2, "pp": 2, "cp": 2, "accumulate": 4, "zero": 1},
        {
            "layout.dp": 2,
            "layout.tp": 2,
            "layout.pp": 2,
            "layout.cp": 2,
            "layout.ep": 1,
            "layout.zero": 1,
            "stage.fullest": 1,
            "state_bytes.weights": 126_080,
            "state_bytes.master": 63_040,  # over dp x cp = 4
            "state_bytes.optimizer": 126_080,
            "activation_bytes": 81_024,  # 3 chunks of a quarter of 108,032
            "logits_bytes": 64_000,  # 32 rows x 500 x 4
            # + inputs of norm and head 2 x 2,048, deviations 64, rotary 1,024: 5,184; three logits 192,000
            "per_device_bytes": 719_488,
            "step.tokens": 512,
            "communication.data.bytes": 189_120,  # 3/4 of 4 x 63,040
            "communication.data.seconds": 18.912e-6,
            "communication.tensor.bytes": 148_992,  # (4,096 x (8 + 1) + 3 x 32 x 4) x 4
            "communication.tensor.seconds": 1.48992e-6,
            "communication.pipeline.bytes": 24_576,  # 2,048 x 4 x 2 chunks there and back, less one of a stage's end
            "communication.pipeline.seconds": 2.4576e-6,
            "communication.context.bytes": 49_152,  # 2,048 of 2 blocks, three times, x 4
            "communication.context.seconds": 4.9152e-6,
            "step.compute_seconds": 99.581952e-6,  # 4 x 3 x (2 x 4,202,496 + 8,192,000) / 4 / 0.5e12
            "step.breakdown_seconds.bubble": 12.941184e-6,  # half of (99.581952 + 1.48992 + 2.4576) / 4
            # 18.912, less two thirds of a micro-batch's computing and its sums, on another link: 24.895488 + 0.37248
            "step.waiting_for_data_seconds": 2.066688e-6,
            "step.optimizer_seconds": 0.44128e-6,  # 28 x 63,040 / 4
            "step.seconds": 118.978624e-6,
            "step.mfu.6ND": 772_472_832 / (16 * 118.978624e6),  # 512 x 1,508,736
        },
    ),
}


def said(name: str, **more: Any) -> dict[str, Any]:  # noqa: ANN401
    spec, options, _ = CASES[name]
    return document(plan(Subject(spec), MACHINE, Options(**{**BASE, **options, **more})))


def at(found: Any, path: str) -> float:  # noqa: ANN401
    for key in path.split("."):
        found = found[key]
    return found


@pytest.mark.parametrize("name", CASES)
def test_by_hand(name: str) -> None:
    found = said(name)
    for path, figure in CASES[name][2].items():
        assert at(found, path) == pytest.approx(figure, rel=1e-9, abs=1e-18), path
    assert sum(found["step"]["breakdown_seconds"].values()) == pytest.approx(found["step"]["seconds"])
    assert sum(line["bytes"] for line in found["ladder"]) == found["per_device_bytes"]


def test_other_widths() -> None:
    """4 bytes of a weight and its gradient, no copy, two moments: 16 x 251,456; the step moves 4 + 8 + 16 of each."""
    found = document(plan(Subject(DENSE), MACHINE_FP32, Options(**{**BASE, "dtype": "fp32"})))
    assert found["state_bytes"]["total"] == 4_023_296
    assert found["state_bytes"]["master"] == 0
    assert found["step"]["optimizer_seconds"] == pytest.approx(28 * 251_456 / 1e12)
    narrow = said("alone", gradient_dtype="fp32", master=False, optimizer="sgd-momentum")
    assert narrow["state_bytes"]["gradients"] == 1_005_824
    assert narrow["state_bytes"]["optimizer_pieces"] == {"momentum": 502_912}  # as wide as the weight
    # reads gradients 4, weights 2 and momentum 2, writes weights and momentum: 12 bytes
    assert narrow["step"]["optimizer_seconds"] == pytest.approx(12 * 251_456 / 1e12)


MACHINE_FP32 = Machine(name="wide", memory_gb=1, bandwidth=1e12, rates={"fp32": 1e12}, source="made up")


def test_a_group_that_does_not_divide_the_node_straddles_two() -> None:
    """Pairs in nodes of three: ranks 2 and 3 are neighbours in different nodes, and all wait for the slowest ring."""
    assert said("tensor parallel", gpus=8, node=4)["communication"]["tensor"]["seconds"] == pytest.approx(1.48224e-6)
    assert said("tensor parallel", gpus=6, node=3)["communication"]["tensor"]["seconds"] == pytest.approx(14.8224e-6)
    alone = said("tensor parallel", gpus=2, node=3)  # there is only one node
    assert alone["communication"]["tensor"]["seconds"] == pytest.approx(1.48224e-6)


def test_a_network_faster_than_the_link_is_no_faster_than_the_link() -> None:
    found = said("ZeRO-3 over two nodes", network=1e15)
    assert found["communication"]["data"]["seconds"] == pytest.approx(3_757_824 / 100e9)


def test_without_a_link_of_its_own_gpus_meet_on_the_bus() -> None:
    """PCIe 4 x16, 32 GB/s."""
    machine = Machine(name="bare", memory_gb=1, bandwidth=1e12, rates={"bf16": 1e12}, source="made up")
    found = document(plan(Subject(DENSE), machine, Options(**{**BASE, "gpus": 2, "tp": 2})))
    assert found["communication"]["tensor"]["seconds"] == pytest.approx(148_224 / 32e9)
    assert "PCIe 4 x16" in found["communication"]["tensor"]["source"]


def test_the_first_stages_have_one_block_more() -> None:
    """Four blocks on three: 2, 1, 1; 126 on sixteen: fourteen of 8 and two of 7."""
    stages = every_section(Subject(DENSE).shares(Options(seq=32)), 3)
    assert [sum(n for _, n in section.stage.blocks) for section in stages] == [2, 1, 1]
    many = llama.build(
        n_vocab=64, d_model=8, n_layers=126, n_heads=1, d_ff=8, max_positions=8, rotary=Rotary(d_rotary=8)
    )
    stages = every_section(Subject(many).shares(Options(seq=8)), 16)
    assert [sum(n for _, n in section.stage.blocks) for section in stages] == [8] * 14 + [7] * 2


# Outside the blocks are 256,128 bytes: the table's 128,000, and the norm's and the head's 128,128, whose gradients wait
# from the loss on. A sparse block has 25,344 bytes and experts of 147,456, in all 172,800; with full checkpointing it
# keeps its input, 8,192 bytes, and four of them with what is outside, a mask of 2,048 for all layers with it, 54,016.
# The head's own backward pass has half a tensor of logits, 128,000, beside the gradient; a block's end the gradient of
# the stream, 8,192.
FSDP: dict[str, tuple[dict[str, Any], list[tuple[str, int, int]]]] = {
    "two ranks": (
        {"gpus": 2},
        [
            ("block", 2 * 256_128 + 2 * 172_800 - 54_016, 0),  # both buffers are there until the block is copied out
            ("block", 256_128 + 3 * 172_800 - 8_192, 0),  # as are those of the last two
            ("loss", 256_128, 0),
            ("gradient", 256_128, 0),
            ("block", 256_128 + 2 * 172_800, 128_128),  # the last: copied out, and the next one's buffer
            ("block", 256_128 + 172_800, 128_128 + 172_800 - 8_192),  # the first: what the one before scatters
            ("block", 256_128 + 2 * 172_800, 128_128 + 172_800 - 8_192),  # one between
            ("block", 256_128 + 172_800, 128_128 + 2 * 172_800 + 8_192 - 8_192),
            ("gradient", 256_128, 256_128 + 172_800 - 54_016),
            ("gradient", 0, 2 * 256_128 - 54_016),
        ],
    ),
    "experts of two ranks, one of them a rank's": (
        {"gpus": 2, "ep": 2},  # 73,728 bytes of experts, which no other rank has: copied, but not through a buffer
        [
            ("block", 2 * 256_128 + 2 * 25_344 + 73_728 - 54_016, 0),
            ("block", 256_128 + 3 * 25_344 + 73_728 - 8_192, 0),
            ("loss", 256_128, 0),
            ("gradient", 256_128, 0),
            ("block", 256_128 + 2 * 25_344 + 73_728, 128_128),
            ("block", 256_128 + 25_344 + 73_728, 128_128 + 25_344 + 73_728 - 8_192),
            ("block", 256_128 + 2 * 25_344 + 73_728, 128_128 + 25_344 + 73_728 - 8_192),
            ("block", 256_128 + 25_344, 128_128 + 2 * 25_344 + 73_728),
            ("gradient", 256_128, 256_128 + 99_072 - 54_016),
            ("gradient", 0, 2 * 256_128 - 54_016),
        ],
    ),
    "copies": (  # whose gradients are those of the state
        {"gpus": 2, "hsdp": 1},
        [
            ("block", 256_128 + 172_800 - 54_016, 0),
            ("block", 256_128 + 172_800 - 8_192, 0),
            ("loss", 256_128, 0),
            ("gradient", 256_128, 0),
            ("block", 256_128 + 172_800, 0),
            ("block", 256_128 + 172_800, 172_800 - 8_192),
            ("block", 256_128 + 172_800, 172_800 - 8_192),
            ("block", 256_128, 172_800),
            ("gradient", 256_128, 172_800 - 54_016),
            ("gradient", 0, 256_128 - 54_016),
        ],
    ),
    "two ranks, gradients in float32": (
        {"gpus": 2, "gradient_dtype": "fp32"},
        [
            ("block", 2 * 256_128 + 2 * 172_800 - 54_016, 0),
            ("block", 256_128 + 3 * 172_800 - 8_192, 0),
            ("loss", 256_128, 0),
            ("gradient", 256_128, 0),
            ("block", 256_128 + 2 * 172_800, 128_128),
            ("block", 256_128 + 172_800, 128_128 + 345_600 - 8_192),
            ("block", 256_128 + 2 * 172_800, 128_128 + 345_600 - 8_192),
            ("block", 256_128 + 172_800, 128_128 + 172_800 + 345_600),
            ("gradient", 256_128, 256_128 + 345_600 - 54_016),
            ("gradient", 0, 256_128 + 512_256 - 54_016),
        ],
    ),
}


@pytest.mark.parametrize("name", FSDP)
def test_what_fsdp_holds_at_each_moment(name: str) -> None:
    options, expected = FSDP[name]
    given = Options(**{**BASE, "zero": 3, "checkpointing": "full", **options})
    stage = plan(Subject(SPARSE), MACHINE, given).trial.fullest
    assert stage.activations + stage.outside == 54_016
    assert [(one.kind, one.gathered, one.scattered) for one in moments(stage)] == expected
    assert stage.moment == max(moments(stage), key=lambda one: one.gathered + one.scattered + one.working)


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (1, [(256_128 + 2 * 172_800, 128_128)]),
        (2, [(256_128 + 2 * 172_800, 128_128), (256_128 + 172_800, 128_128 + 172_800 - 8_192)]),
    ],
)
def test_no_block_of_two_has_one_before_and_one_after_it(number: int, expected: list[tuple[int, int]]) -> None:
    """Of one alone a buffer more is a bound."""
    given = Options(**{**BASE, "gpus": 2, "zero": 3, "checkpointing": "full"})
    stage = plan(Subject(replace(SPARSE, blocks=SPARSE.blocks[:number])), MACHINE, given).trial.fullest
    found = {(one.gathered, one.scattered) for one in moments(stage) if one.working == stage.recompute_peak}
    assert found == set(expected)


def test_gradients_that_zero_2_scatters() -> None:
    """Beyond a rank's half, of the most that wait at once, (128,128 + 147,456) / 2; of experts of its own none."""
    for options, scattered in (({"zero": 2}, 137_792), ({"zero": 1}, 0), ({"zero": 2, "ep": 2}, 64_064)):
        stage = plan(Subject(SPARSE), MACHINE, Options(**{**BASE, "gpus": 2, **options})).trial.fullest
        assert (stage.gathered, stage.scattered) == (0, scattered), options


def test_a_tied_table_has_three_gradients_at_the_end_of_the_backward_pass() -> None:
    """The table's 128,000, positions of 4,096 and a norm of 256, and a block of 99,968 bytes. Four blocks keep 8,192
    each, and 17,152 are saved outside them."""
    given = Options(**{**BASE, "gpus": 2, "zero": 3, "checkpointing": "full"})
    stage = plan(Subject(TIED), MACHINE, given).trial.fullest
    saved, end = stage.activations + stage.outside, list(moments(stage))[-2]
    assert (end.kind, end.gathered, end.scattered) == ("gradient", 132_352, 4_352 + 3 * 128_000 + 99_968 - saved)


def test_a_stage_gathers_a_copy_of_its_weights() -> None:
    """Four stages over two ranks each: a block of 61,696 bytes, a sparse one of 172,800, and what is outside."""
    for spec, block in ((DENSE, 61_696), (SPARSE, 172_800)):
        options = Options(**{**BASE, "gpus": 8, "pp": 4, "zero": 3})
        every = every_section(Subject(spec).shares(options), 4)
        stages = [StageMemory(section=section, layout=options.layout, job=options.job(1)) for section in every]
        assert [stage.gathered for stage in stages] == [block + 128_000, block, block, block + 128_128]


def test_of_unlike_blocks_the_largest_is_gathered() -> None:
    """Two blocks without experts, 61,696 bytes, and two with, 172,800: one and the buffer of another beside 256,128."""
    mixed = replace(SPARSE, blocks=DENSE.blocks[:2] + SPARSE.blocks[:2])
    given = Options(**{**BASE, "gpus": 2, "zero": 3, "checkpointing": "full"})
    stage = plan(Subject(mixed), MACHINE, given).trial.fullest
    assert list(moments(stage))[4].gathered == 256_128 + 2 * 172_800


def test_tables_of_positions_are_kept_for_each_micro_batch_in_flight() -> None:
    """32 cosines and sines of 16, in two bytes: 2,048. Of 4 stages of 2 chunks the second has 9 chunks in flight, four
    and a half micro-batches, the third 2 x 2 - 1 + 4 = 7."""
    spec = llama.build(
        n_vocab=1000,
        d_model=64,
        n_layers=8,
        n_heads=4,
        n_kv_heads=2,
        d_ff=96,
        max_positions=32,
        rotary=Rotary(d_rotary=16),
        name="eight",
    )
    options = Options(**{**BASE, "gpus": 4, "pp": 4, "accumulate": 8})
    every = every_section(Subject(spec).shares(options), 4)
    stages = [StageMemory(section=section, layout=options.layout, job=options.job(2)) for section in every]
    assert [stage.outside for stage in stages[1:3]] == [5 * 2_048, 4 * 2_048]
    assert [stage.in_flight for stage in stages[1:3]] == [4.5, 3.5]


def test_experts_have_a_momentum_and_no_moments_by_muon() -> None:
    """Matrices of the blocks 49,152 + 1,024 of routers + 294,912; tables and head 128,000 and norms 576 by AdamW."""
    for options, each in (({}, (1_380_352, 514_304, 514_304)), ({"gpus": 2, "zero": 1}, (690_176, 257_152, 257_152))):
        stage = plan(Subject(SPARSE), MACHINE, Options(**{**BASE, **options, "optimizer": "muon"})).trial.fullest
        pieces = stage.state.optimizer
        assert (pieces["momentum"], pieces["first moment"], pieces["second moment"]) == each


def test_a_vocabulary_that_is_not_divided() -> None:
    """17 numbers on two devices: each has all of them, for half of the 64 rows or for all."""
    spec = llama.build(
        n_vocab=17,
        d_model=64,
        n_layers=4,
        n_heads=4,
        n_kv_heads=2,
        d_ff=96,
        max_positions=32,
        rotary=Rotary(d_rotary=16),
        name="few",
    )
    for sequence, nbytes in ((True, 2_176), (False, 4_352)):
        options = Options(**{**BASE, "gpus": 2, "tp": 2, "sequence_parallel": sequence})
        assert plan(Subject(spec), MACHINE, options).logits_bytes == nbytes


@pytest.mark.parametrize(
    ("spec", "ep", "said"),
    [
        (DENSE, 2, "this model has no experts"),
        (SPARSE, 3, "does not divide 4 experts"),
        (SPARSE, 8, "does not divide 4 experts"),
    ],
)
def test_why_experts_are_not_divided(spec: Model, ep: int, said: str) -> None:
    with pytest.raises(InputError, match=said):
        plan(Subject(spec), MACHINE, Options(**{**BASE, "gpus": 24, "ep": ep}))


def test_qlora_s_own_rank() -> None:
    """64 (arXiv 2305.14314), where none is given."""
    ranks = [
        options.adapters.rank for options in (Options(qlora=True), Options(qlora=True, lora=3)) if options.adapters
    ]
    assert ranks == [64, 3]
    assert Options().adapters is None


@pytest.mark.parametrize(
    ("gpus", "node", "size", "stride", "inside"),
    [
        (8, 8, 8, 1, True),
        (16, 8, 8, 1, True),
        (16, 8, 16, 1, False),
        (16, 8, 2, 4, True),
        (16, 8, 2, 8, False),
        (12, 8, 3, 1, False),
        (6, 8, 3, 1, True),
        (8, 8, 3, 1, True),
        (9, 8, 3, 1, False),
        (16, 8, 1, 8, True),
    ],
)
def test_which_rings_stay_in_a_node(gpus: int, node: int, size: int, stride: int, inside: bool) -> None:
    for link, between in ((100.0, 10.0), (10.0, 100.0)):
        network = Network(
            gpus=gpus, node=node, link=link, between=between, host=1.0, named={"link": "a", "between": "b"}
        )
        assert network.inside(size, stride) == inside
        assert network.bandwidth(size, stride) == (link if inside else 10.0)
        assert network.source(size, stride) == ("a" if inside else "b")


def test_layouts() -> None:
    assert [divisors(n) for n in (1, 2, 12, 36)] == [[1], [1, 2], [1, 2, 3, 4, 6, 12], [1, 2, 3, 4, 6, 9, 12, 18, 36]]
    assert [ring(n) for n in (1, 2, 4)] == [0, 0.5, 0.75]
    made = arrange(24, tp=2, pp=3, cp=2, ep=4, zero=1)
    assert (made.dp, made.gpus, made.replicas, made.copies) == (2, 24, 4, 1)
    assert made.said == "--tp 2 --pp 3 --ep 4 --cp 2 --zero 1"
    assert arrange(2).said == "--zero 0"
    assert arrange(10**6).dp == 10**6


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gpus", 10**6 + 1),
        ("gpus", 0),
        ("gpus", True),
        ("gpus", 2.0),
        ("tp", 0),
        ("pp", 0),
        ("cp", 0),
        ("ep", 0),
        ("zero", 4),
        ("zero", -1),
        ("zero", True),
        ("ep", 5),
    ],
)
def test_layouts_that_are_none(name: str, value: Any) -> None:  # noqa: ANN401
    with pytest.raises(InputError) as refused:
        arrange(**{"gpus": 8, name: value})
    assert refused.value.field == name


LARGEST = 2**31 - 1
ENDS: list[tuple[str, Any, Any]] = [
    ("batch", LARGEST, LARGEST + 1),
    ("seq", LARGEST, LARGEST + 1),
    ("accumulate", 1, 0),
    ("chunked_loss", 1, 0),
    ("node", LARGEST, LARGEST + 1),
    ("batch", 1, True),
    ("seq", 1, 1.0),
    ("lora", LARGEST, LARGEST + 1),
    ("interleave", 1, 0),
    ("kernel_efficiency", 1, 1.01),
    ("attention_efficiency", 1e-3, 0),
    ("attention_efficiency", 1, 1.01),
    ("utilisation", 1e-3, 0),
    ("utilisation", 1, 1.01),
    ("tokens", 1e18, 1.5e18),
    ("tokens", 0.5, 0),
    ("price", 0, -1.5e-9),
    ("price", 1e6, 1.5e6),
    ("reserve", 0, -1.5e-9),
    ("reserve", 0.99, 1),
    ("network", 1e15, 1.5e15),
    ("network", 1, 0),
    ("host", 1e15, 1.5e15),
    ("host", 1, 0),
    ("price", 1, math.inf),
    ("host", 1, math.nan),
    ("dtype", "fp32", "fp64"),
    ("gradient_dtype", "fp32", "fp8"),
    ("optimizer", "muon", "adam"),
    ("checkpointing", "full", "all"),
    ("loss", "asbuilt", "torch"),
    ("offload", "all", "weights"),
]


@pytest.mark.parametrize(("name", "last", "beyond"), ENDS, ids=str)
def test_the_last_that_is_allowed_and_the_first_that_is_not(name: str, last: Any, beyond: Any) -> None:  # noqa: ANN401
    assert getattr(Options(**{name: last}), name) == last
    with pytest.raises(InputError) as refused:
        Options(**{name: beyond})
    assert refused.value.field == name


def test_days_and_money() -> None:
    """1.6 million tokens, 64 a step, are 25,000 steps of 157.052672 us: 3.9263168 s."""
    found = said("alone", tokens=1.6e6, price=3.6)
    assert found["tokens"] == 1.6e6
    assert found["days"] == found["days_of_layout"] == pytest.approx(3.9263168 / 86400)
    assert found["money"] == pytest.approx(3.9263168 / 3600 * 3.6)
    assert found["flops_total"] == 1_508_736 * 1.6e6
    two = said("data parallel, ZeRO-0", tokens=1.6e6, price=3.6)  # 3,125 steps of 607.088384 us, on two
    assert two["money"] == pytest.approx(3125 * 607.088384e-6 / 3600 * 2 * 3.6)
    assert said("alone")["chinchilla_tokens"] == said("alone")["tokens"] == 5_029_120  # 20 x 251,456


def test_a_utilisation_of_the_whole_step() -> None:
    """6ND of 512 tokens at a quarter of 16 x 10^12: 772,472,832 / 4e12 s; nothing is added, traffic is still said."""
    found = said("together", kernel_efficiency=None, utilisation=0.25, tokens=5.12e6)
    assert found["step"]["seconds"] == pytest.approx(193.118208e-6)
    assert found["step"]["breakdown_seconds"] == {"at the utilisation": pytest.approx(193.118208e-6)}
    assert found["step"]["mfu"]["6ND"] == pytest.approx(0.25)
    assert found["days"] == pytest.approx(10_000 * 193.118208e-6 / 86400)
    assert found["communication"]["tensor"]["bytes"] == 148_992
    assert found["step"]["modelled_seconds"] > 0
    lora = said("adapters", kernel_efficiency=None, utilisation=0.25)
    assert lora["step"]["seconds"] == pytest.approx(56_786_944 / 0.25e12)
    assert "6ND" not in lora["step"]["mfu"]
