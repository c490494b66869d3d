"""The validated options of a training plan, and the constants that are assumptions."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from asbuilt.dtypes import PLAIN, TRAINED
from asbuilt.errors import InputError, one_of
from asbuilt.kernels.memory.loss import LOSSES, Loss
from asbuilt.plan.network import HOST, LINK_SOURCE, NETWORK, NODE
from asbuilt.plan.placement import Placement, arrange
from asbuilt.plan.train import efficiency
from asbuilt.plan.train.choices import CHECKPOINTING, OFFLOADS, Checkpointing, Offload
from asbuilt.plan.train.optimizers import Recipe, optimizer
from asbuilt.plan.train.schedule import SCHEDULES, Schedule

if TYPE_CHECKING:  # they know models, which help does not need
    from asbuilt.plan.train.stages import Job
    from asbuilt.plan.train.work import Adapters

# Hoffmann et al. 2022 (arXiv 2203.15556), Table 3 rounded: about 20 tokens per parameter.
CHINCHILLA = 20
# Radford et al. 2021 (arXiv 2103.00020), section 2.5: 32 epochs of 400 million pairs.
CLIP_PAIRS = 12_800_000_000
# Kaplan et al. 2020 (arXiv 2001.08361): 2 FLOPs per parameter and token forward, 4 backward.
SIX = 6

MASTER_WIDTH = 4
QLORA_RANK = 64  # as in the paper, if --qlora is given without a rank

# Defaults of the options that are assumptions, defined here or in conventions.py. Rates are in bytes/s per GPU.
RESERVE = 0.05
EFFECTIVE = 0.9

ASSUMPTIONS = {
    "products": f"{efficiency.SUSTAINED:.0%} of the fastest product measured on such a machine (A100 86% of the dense "
    "rate, H100 80%, B200 78%, MI300X 60%; in fp8 73 to 76%: stas00/ml-engineering), as a layer of Megatron-LM's "
    "22B on A100 reaches (arXiv 2205.05198, table 4); or its operands at the memory's bandwidth, if that takes longer",
    "scores": f"{efficiency.SCORES:.0%} of the dense rate, masked pairs skipped, backward 2.5 times forward: "
    "FlashAttention-2 reaches 50 to 73% on A100 (arXiv 2307.08691), 35% on H100, FlashAttention-3 75% (2407.08608)",
    "passes": f"saved tensors are moved {efficiency.PASSES} times at {efficiency.MEMORY:.0%} of the bandwidth: written "
    f"and read forward, read backward, their gradients written and read; recomputed ones {efficiency.AGAIN} times more",
    "fp8": f"products of blocks but routers; {efficiency.CAST} bytes are moved for each number that is cast, scaled by "
    "its tensor's largest; saved tensors and weights stay in --dtype",
    "links": f"{efficiency.LINK:.0%} of a link's rate: NCCL reaches 370 of NVLink 4's 450 GB/s (nccl-tests)",
    "communication": f"what overlaps with computing takes {efficiency.TAKEN:.0%} of the device meanwhile: 20 of 132 "
    "multiprocessors (arXiv 2412.19437, section 3.2.2)",
    "kernel efficiency": "if it is given, a lower bound: everything that a device computes at that share of the dense "
    "rate, memory and links at their full rates",
    "interleave": "each block of a pipeline stage is a chunk if the micro-batches are a multiple of the stages, as in "
    "large runs (arXiv 2407.21783, section 3.3.2); otherwise a stage is one chunk, plain 1F1B",
    "reserve": f"{RESERVE:.0%} of the memory for the CUDA context, NCCL's buffers and fragmentation",
    "node": f"{NODE} GPUs share the fast link",
    "network": f"{NETWORK / 1e9:g} GB/s per GPU between nodes: a {NETWORK * 8 / 1e9:g} Gb/s adapter each",
    "host": f"{HOST / 1e9:g} GB/s between a GPU and host memory: PCIe 4 x16 as achieved in practice",
    "link": LINK_SOURCE,
    "optimizer": "its step reads and writes its state once, at full memory bandwidth",
    "overlap": "data-parallel traffic overlaps with the backward pass, a context's ring with all computing, keys "
    "and values that are gathered with none",
    "loss": "three float32 tensors of the logits' size at once, as in PyTorch's cross-entropy; two in asbuilt's, "
    "one where a head is a product alone (measured)",
    "gradient": "the head's new gradient coexists with the one it is added to; three for a tied table (measured)",
    "gathered": "ZeRO-3 is FSDP2 (PyTorch 2.13): copies of the weights outside the blocks, and in a block's backward "
    "pass of its own, with the buffer of the next block's and the scattered gradients of the one before; ZeRO-2 holds "
    "one block's gradients; a pipeline's stage a copy of its weights and all of its gradients, once a step (as "
    "torchtitan does)",
    "effective time": f"{EFFECTIVE:.0%} of a run's time are steps, the rest restarts, checkpoints, lost steps: above "
    "90% in Llama 3's 54 days (arXiv 2407.21783, section 3.3.4); not with a kernel efficiency or --mfu",
    "host step": "an offloaded optimizer's computation on the host takes no time",
    "selective": "recomputation in selective checkpointing takes the time of writing and reading what is recomputed",
    "kernel": "asbuilt's attention: with sinks or capped scores the scores are saved, unless recomputed",
    "predictors": "layers for multi-token prediction are not trained",
    "images": "of models that read images or sounds in a text the text alone is trained; towers, projectors are frozen",
    "backward": "the working memory of a block is what its parts declare (attention, feed-forwards, mixtures of "
    "experts); of other blocks it is taken to be that of a forward pass without gradients",
    "experts": "tokens are spread evenly over the experts",
    "adamw-8bit": "one byte per moment, an fp32 scale per 256 of them; tensors under 4,096 numbers in fp32",
    "muon": "momentum for matrices; AdamW for vectors, embeddings and the head; gathering matrices takes no time",
    "nf4": "4 bits, an 8-bit scale per 64 numbers, an fp32 scale per 256 of those; code tables not counted",
    "lora": "saved tensors as in full training, an upper bound: a frozen matrix without adapter can skip its input",
    "chinchilla": f"{CHINCHILLA} tokens per active parameter (arXiv 2203.15556)",
    "pairs": f"{CLIP_PAIRS / 1e9:g}B pairs of an image and a text: CLIP's 32 epochs of 400M (arXiv 2103.00020); 6ND of "
    "each tower with its own tokens",
    "contrastive": "four float32 tensors as large as the similarities of a micro-batch's pairs at once, as in "
    "asbuilt's loss (measured); pairs of other replicas are not gathered",
    "documents": "one mask of all pairs of a sequence's tokens for each sequence, which layers share; scores are "
    "computed in full, as without it",
    "6ND": "N is the active parameters, including the embedding table; without attention scores and recomputation",
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """All settings of a run except the model and the machine; `batch` sequences are one micro-batch of one replica.

    `gradient_dtype` None means `dtype`; `master` keeps an fp32 copy of narrower weights. `targets` None means all
    matrices of the blocks but the router. `schedule` None is interleaved where the run allows it, else 1F1B;
    `interleave` None is as many chunks of a stage as there are blocks. With a `utilisation` of the whole step nothing
    is computed of its time; with a `kernel_efficiency` it is a lower bound. `attention_efficiency` is the fraction of
    the dense rate that scores reach, None for what is assumed of any kernel. `network` and `host` are bytes/s of one
    GPU, `price` is of one GPU's hour. With `documents` those of a sequence do not attend to each other, so that each
    sequence has positions and a mask of its own. `pad_vocabulary` pads it to a multiple of so many rows a
    tensor-parallel rank. With `gather_context` attention gathers the keys and values of all ranks, rather than passing
    them round a ring.
    """

    gpus: int = 1
    batch: int = 1
    seq: int = 4096
    accumulate: int = 1
    optimizer: str = "adamw"
    dtype: str = "bf16"
    gradient_dtype: str | None = None
    master: bool = True
    zero: int = 0
    tp: int = 1
    pp: int = 1
    ep: int = 1
    cp: int = 1
    hsdp: int | None = None
    schedule: Schedule | None = None
    interleave: int | None = None
    fp8: bool = False
    fp8_dispatch: bool = False
    expert_nodes: int | None = None
    overlap_experts: bool = False
    overlap_tensor: bool = False
    pad_vocabulary: int = 1
    gather_context: bool = False
    sequence_parallel: bool = True
    divide_vocabulary: bool = True
    checkpointing: Checkpointing = "none"
    documents: bool = False
    chunked_loss: int = 1
    loss: Loss = "pytorch"
    offload: Offload = "none"
    lora: int | None = None
    targets: tuple[str, ...] | None = None
    qlora: bool = False
    kernel_efficiency: float | None = None
    attention_efficiency: float | None = None
    utilisation: float | None = None
    tokens: float | None = None
    price: float | None = None
    effective_time: float = EFFECTIVE
    reserve: float = RESERVE
    node: int = NODE
    network: float = NETWORK
    host: float = HOST

    def __post_init__(self) -> None:
        for name in ("batch", "seq", "accumulate", "chunked_loss", "node", "pad_vocabulary"):
            _require_whole(name, getattr(self, name))
        for name in ("lora", "interleave", "hsdp", "expert_nodes"):
            if getattr(self, name) is not None:
                _require_whole(name, getattr(self, name))
        optimizer(self.optimizer)
        _require_choice("dtype", self.dtype, TRAINED)
        _require_choice("gradient_dtype", self.gradient_dtype or self.dtype, TRAINED)
        _require_choice("checkpointing", self.checkpointing, CHECKPOINTING)
        _require_choice("loss", self.loss, LOSSES)
        _require_choice("offload", self.offload, OFFLOADS)
        _require_choice("schedule", self.schedule or SCHEDULES[0], SCHEDULES)
        for name, low, high in NUMBERS:
            require_number(name, getattr(self, name), low, high)
        if self.utilisation is not None and self.kernel_efficiency is not None:
            raise InputError(
                "a utilisation of the whole step includes bubble and communication, a kernel efficiency does not; "
                "both are given",
                field="utilisation",
                value=self.utilisation,
                fix="give --mfu or --kernel-efficiency",
            )
        together = self.utilisation if self.kernel_efficiency is None else self.kernel_efficiency
        if self.attention_efficiency is not None and together is not None:
            raise InputError(
                "the efficiency of all that is computed is given",
                field="attention_efficiency",
                value=self.attention_efficiency,
                fix="leave out --mfu and --kernel-efficiency",
            )
        if self.targets is not None and self.adapters is None:
            raise InputError("needs adapters", field="targets", value=self.targets, fix="give --lora RANK too")

    @property
    def width(self) -> int:
        """Bytes of one weight or activation."""
        return int(PLAIN[self.dtype])

    @property
    def recipe(self) -> Recipe:
        """The widths of the training state."""
        return Recipe(
            optimizer=self.optimizer,
            weight_width=self.width,
            gradient_width=int(PLAIN[self.gradient_dtype or self.dtype]),
            master_width=MASTER_WIDTH if self.master and self.width < MASTER_WIDTH else 0,
        )

    @property
    def adapters(self) -> Adapters | None:
        """The adapters, if any."""
        if self.lora is None and not self.qlora:
            return None
        from asbuilt.plan.train.work import Adapters

        return Adapters(rank=self.lora or QLORA_RANK, targets=self.targets, nf4=self.qlora)

    def job(self, interleave: int) -> Job:
        """Returns the job of the stages, each divided into `interleave` chunks."""
        from asbuilt.plan.train.stages import Job

        return Job(
            recipe=self.recipe,
            batch=self.batch,
            seq=self.seq,
            accumulate=self.accumulate,
            checkpointing=self.checkpointing,
            lora=self.adapters,
            offload=self.offload,
            chunks=self.chunked_loss,
            loss=self.loss,
            width=self.width,
            interleave=interleave,
            schedule=self.schedule or ("interleaved" if interleave > 1 else "1f1b"),
            fp8=self.fp8,
            fp8_dispatch=self.fp8_dispatch,
            expert_nodes=self.expert_nodes,
            overlaps_experts=self.overlap_experts or self.schedule == "dualpipe",
            overlaps_tensor=self.overlap_tensor,
            gathers_context=self.gather_context,
        )

    @property
    def layout(self) -> Placement:
        """The placement; raises InputError if the degrees do not divide the GPUs."""
        degrees = {"tp": self.tp, "pp": self.pp, "ep": self.ep, "cp": self.cp, "zero": self.zero}
        return arrange(self.gpus, **degrees, vocabulary=self.divide_vocabulary, hsdp=self.hsdp)


def require_read(options: Options) -> None:
    """Raises InputError for an option that a plan of this layout does not read; a search may try others."""
    if options.gather_context and options.cp == 1:
        raise InputError("there is no context to gather", field="gather_context", value=True, fix="give --cp too")


def stepping(options: Options, tokens: float, each: int | None = None, *, given: bool = False) -> Options:
    """Returns the options with as many micro-batches as make a step of so many tokens, or pairs, `each` of a sequence.

    Raises InputError where they make no such step, or if micro-batches are `given` too.
    """
    each = options.seq if each is None else each
    once = options.batch * each * options.layout.dp
    if given:
        raise InputError("so are micro-batches", field="tokens_per_step", value=tokens, fix="leave out --accumulate")
    if tokens % once:
        raise InputError(
            f"no whole number of micro-batches: {options.batch} x {each} tokens on {options.layout.dp} replicas",
            field="tokens_per_step",
            value=tokens,
            allowed=f"a multiple of {once:,}",
        )
    return replace(options, accumulate=int(tokens // once))


# name, more than, at most
NUMBERS = (
    ("kernel_efficiency", 0.0, 1.0),
    ("attention_efficiency", 0.0, 1.0),
    ("utilisation", 0.0, 1.0),
    ("tokens", 0.0, 1e18),
    ("effective_time", 0.0, 1.0),
    ("price", -1e-9, 1e6),
    ("reserve", -1e-9, 0.99),
    ("network", 0.0, 1e15),
    ("host", 0.0, 1e15),
)


def _require_whole(name: str, value: object) -> None:
    from asbuilt.spec.part import LARGEST_SIZE

    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not 1 <= value <= LARGEST_SIZE:  # type: ignore[operator]
        raise InputError(field=name, value=value, allowed="a whole number from 1 to 2^31-1")


def _require_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InputError(field=name, value=value, allowed=one_of(allowed))


def require_number(name: str, value: float | None, above: float, most: float) -> None:
    """Raises InputError naming the option unless its value is None or above one bound and at most the other."""
    if value is not None and not (math.isfinite(value) and above < value <= most):
        low = f"above {above:g}" if above >= 0 else "of at least 0"
        raise InputError(field=name, value=value, allowed=f"a number {low} and at most {most:g}")
