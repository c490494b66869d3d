"""The settings of a run: what a recipe says, each with its default. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from asbuilt.errors import InputError, one_of
from asbuilt.spec.part import Role

Name = Literal["adamw", "adamw-8bit", "adafactor", "muon", "sgd"]
NAMES: tuple[Name, ...] = get_args(Name)
Precision = Literal["auto", "fp32", "bf16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
Checkpointing = Literal["none", "selective", "full"]
CHECKPOINTING: tuple[Checkpointing, ...] = get_args(Checkpointing)
ROLES: tuple[Role, ...] = get_args(Role)
Objective = Literal["next", "masked", "spans", "prefix", "prefix-encoder", "pairs", "contrastive"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
Packing = Literal["stream", "documents", "single"]
PACKINGS: tuple[Packing, ...] = get_args(Packing)
Plot = Literal["", "svg", "png"]
PLOTS: tuple[Plot, ...] = get_args(Plot)
UNPADDED = ("spans", "prefix-encoder", "pairs", "contrastive")  # objectives whose rows are made of one text


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Which optimizer, and its numbers; those that it does not have are left unused."""

    name: Name = "adamw"
    """adamw, adamw-8bit (state in 8 bits), adafactor, sgd, or muon for the blocks' matrices and AdamW for the rest."""
    lr: float = 1e-3
    """Peak learning rate, which the schedule multiplies."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay of both moments; the first is SGD's momentum."""
    eps: float = 1e-8
    """Added to AdamW's denominator."""
    weight_decay: float = 0.1
    """Decoupled weight decay, times the learning rate, of the weights that have it."""
    decayed: tuple[Role, ...] = ("matrix",)
    """Roles of the weights that have weight decay: matrix, table, gain, bias."""
    muon_lr: float = 0.02
    """Muon's peak learning rate; 0.02 suits its orthogonal updates."""
    clip: float = 1.0
    """Gradients of a larger norm are scaled to this one; 0 never clips."""

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise InputError(field="optimizer.name", value=self.name, allowed=one_of(NAMES))
        for role in self.decayed:
            if role not in ROLES:
                raise InputError(field="optimizer.decayed", value=role, allowed=one_of(ROLES))
        for name in ("lr", "muon_lr", "eps", "weight_decay", "clip"):
            value = getattr(self, name)
            if not 0.0 <= value < 1e6:
                raise InputError(field=f"optimizer.{name}", value=value, allowed="a number of at least 0")
        if len(self.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise InputError(field="optimizer.betas", value=self.betas, allowed="two numbers from 0 to below 1")


@dataclass(frozen=True, kw_only=True)
class Model:
    """What is trained: a `source`, or the keys of a `config`; one of the two."""

    source: str = ""
    """A config.json, a spec, a checkpoint folder, or a catalogue name."""
    weights: bool = False
    """Whether training starts from the source's weights, rather than from random ones."""
    std: float = 0.02
    """Standard deviation of random matrices and tables; those that write to the stream have std / sqrt(2 layers)."""
    base_width: int = 0
    """With muP the width that std and learning rates were found at (train/width.py); 0 without muP."""
    config: dict[str, Any] = field(default_factory=dict)
    """Keys of a config.json, with its model_type; vocab_size may be left out, it is then that of the tokenizer."""

    def __post_init__(self) -> None:
        if bool(self.source) == bool(self.config):
            both = "both are given" if self.source else "missing"
            raise InputError(both, field="model", allowed="a source, or a config with a model_type")
        if self.weights and not self.source:
            raise InputError("a config has no weights", field="model.weights", value=True, fix="give model.source")
        require_from("model.std", self.std, 0.0)
        require_from("model.base_width", self.base_width, 0)
        if self.base_width and self.weights:
            raise InputError(
                "the source's weights have a scale already", field="model.base_width", value=self.base_width
            )


@dataclass(frozen=True, kw_only=True)
class Data:
    """Texts, how they are cut into sequences, and what is predicted of them."""

    chat: str = ""
    """JSON lines of chats, messages with roles, or prompt and response; the loss is on the answers alone."""
    preferences: str = ""
    """JSON lines of a prompt with a chosen and a rejected answer, for direct preference optimisation."""
    text: str = ""
    """A text file, folder, JSON lines or shards; python:sources, topics, docstrings; contrastive: drawn:shapes."""
    tokenizer: str = "characters"
    """characters: one token for each that occurs; bytes; bpe, trained on the text; a tokenizer.json, or its folder."""
    n_vocab: int = 4096
    """Tokens of the tokenizer bpe."""
    key: str = "text"
    """What names the text in a line of JSON; pairs have source and target."""
    objective: Objective = "next"
    """next token; masked; spans: cut-out ones; prefix, prefix-encoder: the rest; pairs; contrastive: image and text."""
    rate: float = 0.15
    """Share of the tokens that are masked, or cut out in spans."""
    packing: Packing = "stream"
    """stream: rows are cut anywhere; documents: as many whole ones as fit in a row; single: one in a row."""
    separate: bool = False
    """Whether a document's last token has no loss, rather than the next document's first token as its target."""
    document_mask: bool = False
    """Whether the documents of a row do not attend to each other; positions count from each one's first token."""
    context: int = 256
    """Tokens of a sequence; those that an encoder reads, if there is one."""
    target: int = 64
    """Tokens that a decoder writes, of pairs."""
    batch: int = 16
    """Sequences of a micro-batch."""
    validation: float = 0.1
    """Fraction of the text, at its end, that is only validated on."""

    def __post_init__(self) -> None:
        require_from("data.context", self.context, 1)
        require_from("data.batch", self.batch, 1)
        if not 0.0 <= self.validation < 1.0:
            raise InputError(field="data.validation", value=self.validation, allowed="a number from 0 to below 1")
        require_from("data.target", self.target, 2)
        require_from("data.n_vocab", self.n_vocab, 256)
        require_among("data.objective", self.objective, OBJECTIVES)
        require_among("data.packing", self.packing, PACKINGS)
        if not 0.0 < self.rate < 1.0:
            raise InputError(field="data.rate", value=self.rate, allowed="a number between 0 and 1")
        if self.separate and self.objective != "next":
            allowed = f"false for the objective {self.objective}"
            raise InputError(field="data.separate", value=True, allowed=allowed)
        if self.document_mask and self.objective not in ("next", "masked"):
            allowed = f"false for the objective {self.objective}"
            raise InputError(field="data.document_mask", value=True, allowed=allowed)
        if self.document_mask and self.packing == "single":
            problem = "has no effect on rows of one document"
            raise InputError(problem, field="data.document_mask", value=True, allowed="false")
        if self.packing != "stream" and self.objective in UNPADDED:
            allowed = f"stream for the objective {self.objective}"
            raise InputError(field="data.packing", value=self.packing, allowed=allowed)


@dataclass(frozen=True, kw_only=True)
class Step:
    """How the gradient of a step is computed."""

    accumulate: int = 1
    """Micro-batches of a step."""
    z_loss: float = 0.0
    """Weight of (ln Z)^2 in the loss; 1e-4 is usual."""
    loss_rows: int = 0
    """Targets whose logits are held at once; 0 for as many as have 2^24 logits."""
    precision: Precision = "fp32"
    """Of products: fp32; bf16 by autocast, with weights and optimizer state in fp32; auto, the faster one, measured."""
    checkpointing: Checkpointing = "none"
    """Activation checkpointing: none, selective or full."""
    offload: bool = False
    """Whether the optimizer's state is in host memory, and its step there: for devices with memory of their own."""
    compile: bool = False
    """Whether torch.compile makes kernels of the blocks: takes a minute at the start, and a C++ compiler."""

    def __post_init__(self) -> None:
        require_from("step.accumulate", self.accumulate, 1)
        require_from("step.loss_rows", self.loss_rows, 0)
        require_from("step.z_loss", self.z_loss, 0.0)
        require_among("step.precision", self.precision, PRECISIONS)
        require_among("step.checkpointing", self.checkpointing, CHECKPOINTING)
        if self.compile and self.checkpointing != "none":
            problem = "blocks that are compiled keep what the compiler chooses"
            raise InputError(problem, field="step.checkpointing", value=self.checkpointing, allowed="none")


@dataclass(frozen=True, kw_only=True)
class Experts:
    """What keeps the experts of a mixture in equal use; all off by default."""

    auxiliary: float = 0.0
    """Weight of the auxiliary loss, E * sum_e f_e p_e for each router: 1 if balanced, E if one expert has all."""
    z_loss: float = 0.0
    """Weight of the routers' z-loss, the mean of (ln sum e^logits)^2."""
    bias_rate: float = 0.0
    """Step of a router's correction after each step: up for experts with fewer tokens than the mean, else down."""

    sequence: float = 0.0
    """Weight of the auxiliary loss of each sequence alone, averaged over the sequences."""
    capacity: float = 0.0
    """Tokens of a sequence that an expert processes, over the mean, first choices first; 0 for all. Others pass by."""

    def __post_init__(self) -> None:
        for name in ("auxiliary", "z_loss", "bias_rate", "sequence", "capacity"):
            require_from(f"experts.{name}", getattr(self, name), 0.0)

    @property
    def on(self) -> bool:
        """Whether anything is."""
        return bool(self.auxiliary or self.z_loss or self.bias_rate or self.sequence or self.capacity)


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """How the processes that torchrun starts divide a run: they share each batch, and weights as told here."""

    ranks: int = 0
    """Processes of the run; 0 for as many as torchrun starts."""
    shard: int = 0
    """Data-parallel ranks that divide weights, gradients and state (FSDP2; HSDP if not all); 0 for all, 1 for none."""
    tensor: int = 1
    """Neighbouring ranks that compute each layer together, each with its heads and columns."""
    pipeline: int = 1
    """Ranks that a model's blocks are cut over, through which the micro-batches of a step pass (1F1B)."""
    interleave: int = 1
    """Stages of each of these ranks: its blocks are so many chunks, and each micro-batch passes it as often."""
    context: int = 1
    """Of the ranks that share the batch, the neighbours that divide each sequence by its tokens."""
    expert: int = 1
    """Data-parallel ranks over which the experts of mixtures are spread; rows go to them and come back."""
    vocabulary: bool = True
    """Whether ranks that compute layers together divide embedding, head and loss by the vocabulary too."""

    def __post_init__(self) -> None:
        for name in ("ranks", "shard"):
            require_from(f"parallel.{name}", getattr(self, name), 0)
        for name in ("tensor", "pipeline", "interleave", "context", "expert"):
            require_from(f"parallel.{name}", getattr(self, name), 1)


@dataclass(frozen=True, kw_only=True)
class Loop:
    """How long, and what is written when."""

    steps: int = 1000
    """Steps of the whole run."""
    seed: int = 1
    """Seed of the weights and of the order of the data."""
    out: str = "run"
    """Folder of the run: checkpoints, log.jsonl, recipe.toml and the exported model."""
    log_every: int = 10
    """Steps between lines of the log."""
    validate_every: int = 250
    """Steps between validations; 0 for one at the end."""
    save_every: int = 500
    """Steps between checkpoints; 0 for one at the end."""
    keep: int = 2
    """Checkpoints that are kept, the newest."""
    norms_every: int = 0
    """Steps between lines with the gradient norm and the relative update of each weight; 0 for none."""
    sample_every: int = 0
    """Steps between texts that a language model writes after the prompt; 0 for none."""
    prompt: str = "The"
    """What samples begin with."""
    sample_tokens: int = 64
    """Tokens of a sample."""
    sample_temperature: float = 0.8
    """Temperature of samples; 0 is greedy."""
    plot: Plot = ""
    """svg or png: losses and learning rate in OUT/training.svg, drawn again at each validation; needs matplotlib."""
    tensorboard: bool = False
    """Whether OUT/tensorboard gets the numbers of the log; needs the package tensorboard."""
    wandb: str = ""
    """Project of Weights & Biases that gets the numbers of the log; needs the package wandb."""

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("seed", 0), ("log_every", 1), ("keep", 1)):
            require_from(f"run.{name}", getattr(self, name), least)
        for name in ("validate_every", "save_every", "norms_every", "sample_every", "sample_temperature"):
            require_from(f"run.{name}", getattr(self, name), 0)
        require_from("run.sample_tokens", self.sample_tokens, 1)
        require_among("run.plot", self.plot, PLOTS)
        if self.sample_every and not self.prompt:
            raise InputError("empty", field="run.prompt", allowed="at least one token")
        if not self.out:
            raise InputError("missing", field="run.out", allowed="a folder")


def require_from(field: str, value: float, least: float) -> None:
    """Raises InputError unless the number is at least this."""
    if not least <= value < 2**63:
        raise InputError(field=field, value=value, allowed=f"a number of at least {least:g}")


def require_among(field: str, value: object, allowed: tuple[object, ...]) -> None:
    """Raises InputError unless the value is one of these."""
    if value not in allowed:
        raise InputError(field=field, value=value, allowed=one_of(allowed))
