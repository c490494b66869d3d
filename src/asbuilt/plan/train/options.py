"""The validated options of a training plan, and the constants that are assumptions."""

from __future__ import annotations

import math
from dataclasses import dataclass

from asbuilt.dtypes import PLAIN, TRAINED
from asbuilt.errors import InputError, one_of
from asbuilt.kernels.memory.loss import LOSSES, Loss
from asbuilt.plan.network import LINK_SOURCE, NETWORK, NODE
from asbuilt.plan.placement import Placement, arrange
from asbuilt.plan.train.optimizers import Recipe, optimizer
from asbuilt.plan.train.shares import CHECKPOINTING, Adapters, Checkpointing
from asbuilt.plan.train.stages import OFFLOADS, Job, Offload
from asbuilt.spec.part import LARGEST_SIZE

# Hoffmann et al. 2022 (arXiv 2203.15556), Table 3 rounded: about 20 tokens per parameter.
CHINCHILLA = 20
# Kaplan et al. 2020 (arXiv 2001.08361): 2 FLOPs per parameter and token forward, 4 backward.
SIX = 6

MASTER_WIDTH = 4
QLORA_RANK = 64  # as in the paper, if --qlora is given without a rank

# Defaults of the options that are assumptions, defined here or in conventions.py. Rates are in bytes/s per GPU.
KERNEL_EFFICIENCY = 0.57
RESERVE = 0.05
HOST = 25e9

ASSUMPTIONS = {
    "kernel efficiency": f"{KERNEL_EFFICIENCY:.0%} of the dense rate while a device computes: a layer of Megatron-LM's "
    "22B on A100 takes 19.0 ms, 2.3 of them all-reduces, for 9.4 ms of FLOPs (arXiv 2205.05198, Table 4)",
    "interleave": "each block of a pipeline stage is a chunk if the micro-batches are a multiple of the stages, as in "
    "large runs (arXiv 2407.21783, section 3.3.2); otherwise a stage is one chunk, plain 1F1B",
    "reserve": f"{RESERVE:.0%} of the memory for the CUDA context, NCCL's buffers and fragmentation",
    "node": f"{NODE} GPUs share the fast link",
    "network": f"{NETWORK / 1e9:g} GB/s per GPU between nodes: a {NETWORK * 8 / 1e9:g} Gb/s adapter each",
    "host": f"{HOST / 1e9:g} GB/s between a GPU and host memory: PCIe 4 x16 as achieved in practice",
    "link": LINK_SOURCE,
    "optimizer": "its step reads and writes its state once, at full memory bandwidth",
    "overlap": "data-parallel traffic overlaps with the backward pass, a context's ring with all computing",
    "loss": "three float32 tensors of the logits' size at once, as in PyTorch's cross-entropy; two in asbuilt's "
    "(measured)",
    "gradient": "the head's new gradient coexists with the one it is added to; three for a tied table (measured)",
    "gathered": "ZeRO-3 gathers two blocks and the weights outside the blocks; ZeRO-2 and 3 hold one block's gradients",
    "host step": "an offloaded optimizer's computation on the host takes no time",
    "selective": "recomputation in selective checkpointing takes no time",
    "kernel": "asbuilt's attention: with sinks or capped scores the scores are saved, unless recomputed",
    "predictors": "layers for multi-token prediction are not trained",
    "images": "training is on text alone: towers of images and sounds and their projectors are held frozen",
    "backward": "the working memory of a block's backward pass is taken to be that of its forward pass",
    "experts": "tokens are spread evenly over the experts",
    "adamw-8bit": "one byte per moment, an fp32 scale per 256 of them; tensors under 4,096 numbers in fp32",
    "muon": "momentum for matrices; AdamW for vectors, embeddings and the head; gathering matrices takes no time",
    "nf4": "4 bits, an 8-bit scale per 64 numbers, an fp32 scale per 256 of those; code tables not counted",
    "lora": "saved tensors as in full training, an upper bound: a frozen matrix without adapter can skip its input",
    "chinchilla": f"{CHINCHILLA} tokens per active parameter (arXiv 2203.15556)",
    "6ND": "N is the active parameters, including the embedding table; without attention scores and recomputation",
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """All settings of a run except the model and the machine; `batch` sequences are one micro-batch of one replica.

    `gradient_dtype` None means `dtype`; `master` keeps an fp32 copy of narrower weights. `targets` None means all
    matrices of the blocks but the router. `interleave` None is as many chunks of a stage as the run allows. With a
    `utilisation` of the whole step nothing is computed of its time; without, kernels reach `kernel_efficiency`.
    `network` and `host` are bytes/s of one GPU, `price` is of one GPU's hour.
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
    interleave: int | None = None
    sequence_parallel: bool = True
    divide_vocabulary: bool = True
    checkpointing: Checkpointing = "none"
    chunked_loss: int = 1
    loss: Loss = "pytorch"
    offload: Offload = "none"
    lora: int | None = None
    targets: tuple[str, ...] | None = None
    qlora: bool = False
    kernel_efficiency: float = KERNEL_EFFICIENCY
    utilisation: float | None = None
    tokens: float | None = None
    price: float | None = None
    reserve: float = RESERVE
    node: int = NODE
    network: float = NETWORK
    host: float = HOST

    def __post_init__(self) -> None:
        for name in ("batch", "seq", "accumulate", "chunked_loss", "node"):
            _require_whole(name, getattr(self, name))
        for name in ("lora", "interleave"):
            if getattr(self, name) is not None:
                _require_whole(name, getattr(self, name))
        optimizer(self.optimizer)
        _require_choice("dtype", self.dtype, TRAINED)
        _require_choice("gradient_dtype", self.gradient_dtype or self.dtype, TRAINED)
        _require_choice("checkpointing", self.checkpointing, CHECKPOINTING)
        _require_choice("loss", self.loss, LOSSES)
        _require_choice("offload", self.offload, OFFLOADS)
        for name, low, high in NUMBERS:
            require_number(name, getattr(self, name), low, high)
        if self.utilisation is not None and self.kernel_efficiency != KERNEL_EFFICIENCY:
            raise InputError(
                "a utilisation of the whole step includes bubble and communication, a kernel efficiency does not; "
                "both are given",
                field="utilisation",
                value=self.utilisation,
                fix="give --mfu or --kernel-efficiency",
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
        return Adapters(rank=self.lora or QLORA_RANK, targets=self.targets, nf4=self.qlora)

    def job(self, interleave: int) -> Job:
        """Returns the job of the stages, each divided into `interleave` chunks."""
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
        )

    @property
    def layout(self) -> Placement:
        """The placement; raises InputError if the degrees do not divide the GPUs."""
        degrees = {"tp": self.tp, "pp": self.pp, "ep": self.ep, "cp": self.cp, "zero": self.zero}
        return arrange(self.gpus, **degrees, vocabulary=self.divide_vocabulary)


# name, more than, at most
NUMBERS = (
    ("kernel_efficiency", 0.0, 1.0),
    ("utilisation", 0.0, 1.0),
    ("tokens", 0.0, 1e18),
    ("price", -1e-9, 1e6),
    ("reserve", -1e-9, 0.99),
    ("network", 0.0, 1e15),
    ("host", 0.0, 1e15),
)


def _require_whole(name: str, value: object) -> None:
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
