"""One torch module per part: parameters named as the part holds them, computation as the part declares it.

Shapes: batch B, new tokens T, model width M, query heads H, key/value heads K, head width D.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asbuilt.errors import InputError
from asbuilt.kernels.attention import attend
from asbuilt.kernels.norm import rms_norm
from asbuilt.kernels.rotary import rotate
from asbuilt.kernels.rows import linear, row_products
from asbuilt.nn.cross import CrossAttention
from asbuilt.nn.experts import MixtureOfExperts
from asbuilt.nn.latent import LatentAttention
from asbuilt.nn.linear import Linear, PartModule
from asbuilt.nn.relative import ProjectedDistances
from asbuilt.nn.step import AttentionPattern, Step
from asbuilt.nn.vision import Contrast, MLPProjector, OneToken, PatchEmbedding, PooledProjector, Vision
from asbuilt.spec import attention, cross, encoder, experts, feedforward, latent, model, norms, positions, vision
from asbuilt.spec.part import Kernel, Part
from asbuilt.spec.relative import RelativeProjection

if TYPE_CHECKING:
    from asbuilt.generate.cache import Cache

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "quick_gelu": lambda x: F.silu(1.702 * x) / 1.702,
}


class TokenEmbedding(PartModule):
    """Looks up one vector per token, and multiplies it to the model's width where the table has another."""

    weight: Tensor
    project: Linear | None

    def __init__(self, part: model.TokenEmbedding, path: str) -> None:
        super().__init__(part, path)
        self.scale = part.scale
        if part.d_table is None:
            self.project = None

    def forward(self, tokens_BT: Tensor, step: Step) -> Tensor:
        """Returns (B, T, M)."""
        x = F.embedding(tokens_BT, self.weight)
        return scaled(x if self.project is None else self.project(x), self.scale)


class SharedEmbedding(PartModule):
    """Looks up one vector per token in a table that is lent."""

    def __init__(self, part: model.SharedEmbedding, path: str) -> None:
        super().__init__(part, path)
        self.scale = part.scale

    def forward(self, tokens_BT: Tensor, step: Step) -> Tensor:
        """Returns (B, T, M)."""
        assert step.table_VM is not None, "the whole model has a table to lend"
        return scaled(F.embedding(tokens_BT, step.table_VM), self.scale)


def scaled(x_BTM: Tensor, scale: float) -> Tensor:
    """Returns the vectors multiplied by a factor in their own dtype, as models that scale them were trained."""
    return x_BTM if scale == 1.0 else x_BTM * torch.tensor(scale, dtype=x_BTM.dtype, device=x_BTM.device)


class BiasTable(PartModule):
    """Holds the numbers of a stack's relative buckets."""

    weight: Tensor


class LearnedPositions(PartModule):
    """Looks up one vector per position."""

    weight: Tensor

    def __init__(self, part: positions.LearnedPositions, path: str) -> None:
        super().__init__(part, path)
        self.offset = part.offset

    def forward(self, step: Step) -> Tensor:
        """Returns (B or 1, T, M)."""
        return F.embedding(step.positions_BT + self.offset if self.offset else step.positions_BT, self.weight)


class TypeEmbedding(PartModule):
    """Looks up one vector per token's type."""

    weight: Tensor

    def forward(self, types_BT: Tensor) -> Tensor:
        """Returns (B, T, M)."""
        return F.embedding(types_BT, self.weight)


class Sinusoids(PartModule):
    """Looks up the sines and cosines of a position."""

    weight: Tensor

    def __init__(self, part: positions.Sinusoids, path: str) -> None:
        super().__init__(part, path)
        with torch.no_grad():
            self.weight.copy_(sinusoids(part))

    def forward(self, step: Step) -> Tensor:
        """Returns (B or 1, T, M)."""
        return F.embedding(step.positions_BT, self.weight)


def sinusoids(part: positions.Sinusoids) -> Tensor:
    """Returns the table (n_positions, d_model) in float64."""
    angles = torch.arange(part.n_positions, dtype=torch.float64)[:, None]
    angles = angles * torch.tensor(part.frequencies, dtype=torch.float64)
    sines, cosines = angles.sin(), angles.cos()[:, : part.d_model // 2]
    if part.layout == "halves":
        return torch.cat((sines, cosines), 1)
    table = angles.new_empty(part.n_positions, part.d_model)
    table[:, 0::2], table[:, 1::2] = sines, cosines
    return table


class RMSNorm(PartModule):
    """x / sqrt(mean(x^2) + eps) * gain."""

    weight: Tensor | None

    def __init__(self, part: norms.RMSNorm, path: str) -> None:
        super().__init__(part, path)
        self.d, self.eps, self.offset = part.d, part.eps, part.gain == "offset"
        if part.gain == "none":
            self.register_parameter("weight", None)

    def forward(self, x: Tensor) -> Tensor:
        """Returns x normalised over its last dimension."""
        return rms_norm(x, self.weight, self.eps, offset=self.offset)


class LayerNorm(PartModule):
    """(x - mean) / sqrt(var + eps) * weight + bias."""

    weight: Tensor

    def __init__(self, part: norms.LayerNorm, path: str) -> None:
        super().__init__(part, path)
        self.d, self.eps = part.d, part.eps
        for name in ("weight", "bias"):
            if name not in part.holds():
                self.register_parameter(name, None)

    def forward(self, x: Tensor) -> Tensor:
        """Returns x normalised over its last dimension."""
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.eps)  # type: ignore[arg-type]


class Attention(PartModule):
    """Attention over grouped heads, with a cache when the step has one."""

    q: Linear
    k: Linear
    v: Linear
    o: Linear
    sinks: Tensor | None

    def __init__(self, part: attention.Attention, path: str) -> None:
        super().__init__(part, path)
        self.part = part
        self.scale = part.scale if part.scale is not None else part.d_head**-0.5
        self.qkv = self.fused(self.q, self.k, self.v)
        self.q_norm = norm(part.q_norm, f"{path}.q_norm")
        self.k_norm = norm(part.k_norm, f"{path}.k_norm")
        alibi = part.positions if isinstance(part.positions, positions.Alibi) else None
        relative = part.positions if isinstance(part.positions, positions.RelativeBuckets) else None
        self.pattern = AttentionPattern(part.causal, part.window, part.chunk, alibi, relative)
        far = part.positions if isinstance(part.positions, RelativeProjection) else None
        self.positions = None if far is None else ProjectedDistances(far, f"{path}.positions")
        if not part.sinks:
            self.register_parameter("sinks", None)

    def forward(self, x_BTM: Tensor, step: Step) -> Tensor:
        """Returns (B, T, M)."""
        part = self.part
        B, T, _ = x_BTM.shape
        q, k, v = self.heads(x_BTM, step)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        if step.cache is not None and part.causal and part.cached:
            k, v = step.cache.layers[self.path].update((k, v), step)
        learned = self.pattern.relative is not None or self.positions is not None
        y = attend(
            q.transpose(1, 2),
            k,
            v,
            step.mask(self.pattern, q.dtype) if self.positions is None else self.positions(q, step, self.scale),
            scale=self.scale,
            softcap=part.softcap,
            sinks=self.sinks,
            # fused kernels give no gradient to what is added to the scores
            kernel="reference" if learned else step.kernel,
        )
        return self.o((y.transpose(1, 2) if T > 1 else y).reshape(B, T, part.d_query))

    def heads(self, x_BTM: Tensor, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q (B, T, H, D), k and v (B, T, K, D), q and k normalised and turned by their positions."""
        part = self.part
        B, T, _ = x_BTM.shape
        joined = None if self.q_norm is not None or self.k_norm is not None else self.qkv.joined(x_BTM)
        if joined is not None:  # no norm between: queries and keys are turned at once
            qk, v = joined.view(B, T, -1, part.d_head).split((part.n_heads + part.n_kv_heads, part.n_kv_heads), 2)
            q, k = self.turned(qk, step).split((part.n_heads, part.n_kv_heads), 2)
        else:
            q, k, v = (y.view(B, T, -1, part.d_head) for y in self.qkv(x_BTM))
            q, k = self.placed(self.q_norm, q, step), self.placed(self.k_norm, k, step)
        if part.temperature is not None:
            q = q * step.temperature(part.temperature, q.dtype)
        return q, k, v

    def placed(self, norm: nn.Module | None, heads: Tensor, step: Step) -> Tensor:
        """Returns heads normalised and turned, in the part's order."""
        if self.part.rotate_first:
            return normed(norm, self.turned(heads, step))
        return self.turned(normed(norm, heads), step)

    def turned(self, heads: Tensor, step: Step) -> Tensor:
        """Returns heads (B, T, any, D) turned by their positions."""
        rotary = self.part.positions
        if not isinstance(rotary, positions.Rotary):
            return heads
        return rotate(heads, step.turn(rotary, heads.dtype), rotary.pairing)


def normed(norm: nn.Module | None, heads: Tensor) -> Tensor:
    """Returns (B, T, H, D) normalised by head, or over all heads together where the norm is that wide."""
    if norm is None:
        return heads
    per_head = norm.d == heads.shape[-1]
    return norm(heads) if per_head else norm(heads.flatten(2)).view(heads.shape)


class MLP(PartModule):
    """down(activation(up(x)))."""

    up: Linear
    down: Linear

    def __init__(self, part: feedforward.MLP, path: str) -> None:
        super().__init__(part, path)
        self.activation = ACTIVATIONS[part.activation]

    def forward(self, x_BTM: Tensor, step: Step) -> Tensor:
        """Returns (B, T, M)."""
        return self.down(self.activation(self.up(x_BTM)))


class GatedMLP(PartModule):
    """down(activation(gate(x)) * up(x))."""

    gate: Linear
    up: Linear
    down: Linear

    def __init__(self, part: feedforward.GatedMLP, path: str) -> None:
        super().__init__(part, path)
        self.activation = ACTIVATIONS[part.activation]
        self.gate_up = self.fused(self.gate, self.up)

    def forward(self, x_BTM: Tensor, step: Step) -> Tensor:
        """Returns (B, T, M)."""
        gate, up = self.gate_up(x_BTM)
        hidden = self.activation(gate)
        # autograd needs the factors later; without it the product may take the first one's place
        return self.down(hidden * up if torch.is_grad_enabled() else hidden.mul_(up))


def mixture(part: experts.MixtureOfExperts, path: str) -> MixtureOfExperts:
    """Returns the module of a mixture of experts, its shared expert made as any other feed-forward."""
    shared = None if part.shared is None else module(part.shared, f"{path}.shared")
    return MixtureOfExperts(part, path, ACTIVATIONS[part.activation], shared)


def latent_attention(part: latent.LatentAttention, path: str) -> LatentAttention:
    """Returns the module of latent attention, its norms made as any other."""
    return LatentAttention(part, path, norm(part.q_norm, f"{path}.q_norm"), norm(part.kv_norm, f"{path}.kv_norm"))


def mlp_projector(part: vision.MLPProjector, path: str) -> MLPProjector:
    """Returns the module of a projector of matrices."""
    return MLPProjector(part, path, ACTIVATIONS[part.activation])


def pooled_projector(part: vision.PooledProjector, path: str) -> PooledProjector:
    """Returns the module of a projector of means, its norm made as any other."""
    return PooledProjector(part, path, module(part.norm, f"{path}.norm"))


def multimodal(part: vision.Vision, path: str) -> Vision:
    """Returns the module of images in a text, its tower a model."""
    return Vision(part, Model(part.tower, f"{path}.tower"), module(part.projector, f"{path}.projector"))


def contrast(part: vision.Contrast, path: str) -> Contrast:
    """Returns the module of images beside texts, its tower a model."""
    return Contrast(part, path, Model(part.tower, f"{path}.tower"))


class Parallel(nn.Module):
    """attention(x) + ffn(x)."""

    def __init__(self, part: model.Parallel, path: str) -> None:
        super().__init__()
        self.attention = module(part.attention, f"{path}.attention")
        self.ffn = module(part.ffn, f"{path}.ffn")

    def forward(self, x_BTM: Tensor, step: Step) -> Tensor:
        """Returns (B, T, M)."""
        return self.attention(x_BTM, step) + self.ffn(x_BTM, step)


class Branch(nn.Module):
    """sum_norm(x + scale * post_norm(body(norm(x))))."""

    def __init__(self, part: model.Branch, path: str) -> None:
        super().__init__()
        self.norm = norm(part.norm, f"{path}.norm")
        self.body = module(part.body, f"{path}.body")
        self.post_norm = norm(part.post_norm, f"{path}.post_norm")
        self.sum_norm = norm(part.sum_norm, f"{path}.sum_norm")
        self.scale, self.parallel = part.scale, part.parallel

    def forward(self, x_BTM: Tensor, stream_BTM: Tensor, step: Step) -> Tensor:
        """Returns the stream with this branch of x added."""
        y = self.body(x_BTM if self.norm is None else self.norm(x_BTM), step)
        if self.post_norm is not None:
            y = self.post_norm(y)
        y = stream_BTM + y if self.scale == 1.0 else torch.add(stream_BTM, y, alpha=self.scale)
        return y if self.sum_norm is None else self.sum_norm(y)


class Block(nn.Module):
    """Residual branches in order, each under its own name."""

    def __init__(self, part: model.Block, path: str) -> None:
        super().__init__()
        for branch in part.branches:
            self.add_module(branch.name, Branch(branch, f"{path}.{branch.name}"))

    def forward(self, x_BTM: Tensor, step: Step) -> Tensor:
        """Returns the stream with every branch added."""
        stream_BTM = x_BTM
        for branch in self._modules.values():
            if not branch.parallel:  # type: ignore[union-attr]
                x_BTM = stream_BTM
            stream_BTM = branch(x_BTM, stream_BTM, step)  # type: ignore[misc]
        return stream_BTM


class HeadTransform(PartModule):
    """LayerNorm(activation(x W^T + b))."""

    dense: Linear
    norm: Linear  # holds the norm's gain and bias

    def __init__(self, part: encoder.HeadTransform, path: str) -> None:
        super().__init__(part, path)
        self.d_model, self.eps, self.activation = part.d_model, part.eps, ACTIVATIONS[part.activation]

    def forward(self, x: Tensor) -> Tensor:
        """Returns (..., M)."""
        x = self.activation(self.dense(x))
        return F.layer_norm(x, (self.d_model,), self.norm.weight, self.norm.bias, self.eps)


class Pooler(PartModule):
    """tanh(x W^T + b)."""

    dense: Linear

    def forward(self, x: Tensor) -> Tensor:
        """Returns (..., M)."""
        return torch.tanh(self.dense(x))


class Head(PartModule):
    """Logits with a matrix of its own, or with the embedding's table."""

    weight: Tensor | None
    shift: Tensor | None
    project: Linear | None

    def __init__(self, part: model.Head | model.TiedHead, path: str) -> None:
        super().__init__(part, path)
        if part.d_table is None:
            self.project = None
        self.scale, self.softcap = part.scale, part.softcap
        self.transform = None if part.transform is None else HeadTransform(part.transform, f"{path}.transform")
        for name in ("weight", "bias"):
            if name not in part.holds():
                self.register_parameter(name, None)
        if not part.shift:
            self.register_buffer("shift", None)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """Returns (..., n_vocab)."""
        if self.transform is not None:
            x = self.transform(x)
        if self.project is not None:
            x = self.project(x)
        logits = linear(x, table if self.weight is None else self.weight, self.bias)  # type: ignore[arg-type]
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.shift is not None:
            logits = logits + self.shift.to(logits.dtype)
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


class Predictor(PartModule):
    """head(norm(block(join [token_norm(embedding), stream_norm(stream)]))): no pass of a model runs it."""

    join: Linear

    def __init__(self, part: model.Predictor, path: str) -> None:
        super().__init__(part, path)
        self.embedding = TokenEmbedding(part.embedding, f"{path}.embedding")
        self.token_norm = module(part.token_norm, f"{path}.token_norm")
        self.stream_norm = module(part.stream_norm, f"{path}.stream_norm")
        self.block = Block(part.block, f"{path}.block")
        self.norm = module(part.norm, f"{path}.norm")
        self.head = Head(part.head, f"{path}.head")
        self.requires_grad_(False)

    def forward(self, next_BT: Tensor, stream_BTM: Tensor, step: Step) -> Tensor:
        """Returns logits (B, T, n_vocab) of the tokens after `next_BT`, which each follow a place of the stream."""
        halves = self.token_norm(self.embedding(next_BT, step)), self.stream_norm(stream_BTM)
        x_BTM = self.block(self.join(torch.cat(halves, -1)), step)
        return self.head(self.norm(x_BTM), self.embedding.weight)


class Model(nn.Module):
    """A stack from tokens to logits, or to the normed stream; `spec` is the description it was built from."""

    def __init__(self, part: model.Model, path: str = "") -> None:
        super().__init__()
        self.spec = part
        at = f"{path}." if path else ""
        self.encoder = None if part.encoder is None else Model(part.encoder, f"{at}encoder")
        self.vision = None if part.vision is None else module(part.vision, f"{at}vision")
        self.embedding = module(part.embedding, f"{at}embedding")
        self.positions = None if part.positions is None else module(part.positions, f"{at}positions")
        self.types = None if part.types is None else module(part.types, f"{at}types")
        self.embedding_norm = norm(part.embedding_norm, f"{at}embedding_norm")
        self.relative = None if part.relative is None else BiasTable(part.relative, f"{at}relative")
        self.blocks = nn.ModuleList(Block(block, f"{at}blocks.{i}") for i, block in enumerate(part.blocks))
        self.norm = norm(part.norm, f"{at}norm")
        self.head = None if part.head is None else module(part.head, f"{at}head")
        self.pooler = None if part.pooler is None else module(part.pooler, f"{at}pooler")
        if part.predictors:
            made = (Predictor(predictor, f"{at}predictors.{i}") for i, predictor in enumerate(part.predictors))
            self.predictors = nn.ModuleList(made)

    def forward(
        self,
        tokens_BT: Tensor,
        *,
        cache: Cache | None = None,
        valid_BT: Tensor | None = None,
        types_BT: Tensor | None = None,
        source_BS: Tensor | None = None,
        source_valid_BS: Tensor | None = None,
        images: Tensor | None = None,
        reach: tuple[int, ...] | None = None,
        last: bool = False,
        kernel: Kernel = "fused",
    ) -> Tensor:
        """Returns logits (B, T, n_vocab), or (B, 1, n_vocab) of each row's last real token when `last`.

        `cache` is continued and extended; `valid_BT` marks real tokens, padding may be on either side; `kernel` is
        "fused" or "reference". `types_BT` are the tokens' types where the model has such, 0 unless given. An encoder
        reads `source_BS`, which is given with a sequence's first tokens. Without a head it is the stream (B, T, M) that
        is returned; of a head that reads one token, its numbers (B, n).

        Where rotary positions depend on how long a text is, each row's are those of its own text up to the last of
        these tokens, as in one pass over all of it; what is cached under others is first read again. `reach` says how
        long the texts are, where they are given in pieces, and spares that.

        A model of patches takes images (N, C, H, W) in the tokens' place. One with a tower takes `images` too, as
        (N, C, H, W) in order or (B, n, C, H, W), and either puts what it makes of them in the placeholders' places, or
        returns how near each is to each text, (N, B). Raises InputError for images that do not fit.
        """
        if isinstance(self.embedding, PatchEmbedding):
            return self.of_images(tokens_BT, kernel)
        step = self.begin((tokens_BT.shape[0], tokens_BT.shape[1]), tokens_BT.device, cache, valid_BT, kernel, reach)
        step.types_BT = types_BT
        if self.encoder is not None:
            self.read(source_BS, source_valid_BS, step)
        if images is not None:
            if self.vision is None:
                raise InputError("this model has no vision", field="images", value=tuple(images.shape), allowed="none")
            assert isinstance(self.vision, Vision | Contrast)
            images = self.vision.images(images)
            if isinstance(self.vision, Vision):
                step.images_NPM = self.vision(images, kernel)
        if cache is not None and cache.rotaries:
            self.read_again(cache, step)
        with row_products(self.any_weight, tokens_BT.numel()):
            made = self.logits(tokens_BT, step, last)
        if cache is not None and cache.rotaries:
            cache.record(tokens_BT, step, self.images_by_row(tokens_BT, step))
        return self.vision(images, made, kernel) if images is not None and isinstance(self.vision, Contrast) else made

    def of_images(self, pixels: Tensor, kernel: Kernel, depth: int | None = None) -> Tensor:
        """Returns what a model of patches makes of images (N, C, H, W); the stream after `depth` blocks if not None."""
        pixels, step = self.opened(pixels, kernel)
        with row_products(self.any_weight, step.batch * step.tokens):
            return self.logits(pixels, step, last=False) if depth is None else self.stream(pixels, step, depth)

    def opened(self, pixels: Tensor, kernel: Kernel) -> tuple[Tensor, Step]:
        """Returns the images as they are read, and a pass over their patches; raises InputError for other sizes."""
        assert isinstance(self.embedding, PatchEmbedding)
        pixels = self.embedding.images(pixels)
        return pixels, self.begin((len(pixels), self.embedding.part.n_tokens), pixels.device, None, None, kernel)

    def states(self, tokens_BT: Tensor, *, valid_BT: Tensor | None = None, kernel: Kernel = "fused") -> Tensor:
        """Returns (B, T, M): the stream after the final norm, whatever head there is."""
        x_BTM = self.stream(
            tokens_BT, self.begin((tokens_BT.shape[0], tokens_BT.shape[1]), tokens_BT.device, None, valid_BT, kernel)
        )
        return x_BTM if self.norm is None else self.norm(x_BTM)

    def pooled(
        self,
        tokens_BT: Tensor,
        *,
        valid_BT: Tensor | None = None,
        types_BT: Tensor | None = None,
        kernel: Kernel = "fused",
    ) -> Tensor:
        """Returns (B, M): what the pooler makes of each row's first real token. Arguments as `forward` takes them."""
        assert self.pooler is not None, "this model has no pooler"
        if isinstance(self.embedding, PatchEmbedding):
            tokens_BT, step = self.opened(tokens_BT, kernel)
        else:
            step = self.begin((tokens_BT.shape[0], tokens_BT.shape[1]), tokens_BT.device, None, valid_BT, kernel)
        step.types_BT = types_BT
        with row_products(self.any_weight, tokens_BT.numel()):
            x_BTM = first_token(self.stream(tokens_BT, step), valid_BT)
            return self.pooler(x_BTM if self.norm is None else self.norm(x_BTM))[:, 0]

    @property
    def table_VM(self) -> Tensor:
        """The embedding's table, which a tied head multiplies and an encoder may look its tokens up in."""
        return self.embedding.weight  # type: ignore[return-value]  # pyright: ignore[reportReturnType]

    @property
    def any_weight(self) -> Tensor:
        """A parameter, whose dtype and device are the model's."""
        return next(self.parameters())

    def read(self, source_BS: Tensor | None, valid_BS: Tensor | None, step: Step) -> None:
        """Lends the step what the encoder makes of the source; later passes over a cache only which tokens are real."""
        assert self.encoder is not None
        if source_BS is not None:
            shape = (source_BS.shape[0], source_BS.shape[1])
            inner = self.encoder.begin(shape, source_BS.device, None, valid_BS, step.kernel)
            inner.table_VM = self.table_VM
            step.source_BSM = self.encoder.logits(source_BS, inner, last=False)
            if step.cache is not None:
                step.cache.begin_source(source_BS.shape[1], valid_BS)
        elif step.cache is not None:
            valid_BS = step.cache.source_valid_BS
        step.source_mask = source_mask(valid_BS)

    def logits(self, tokens_BT: Tensor, step: Step, last: bool) -> Tensor:
        """Returns the logits of one step, of all tokens or of each row's last; the normed stream without a head."""
        x_BTM = self.stream(tokens_BT, step)
        if isinstance(self.head, OneToken):
            x_BTM = self.head.token(x_BTM, tokens_BT)
        elif last:
            x_BTM = last_token(x_BTM, step.valid_BT)
        if self.norm is not None:
            x_BTM = self.norm(x_BTM)
        return x_BTM if self.head is None else self.head(x_BTM, self.table_VM)

    def stream(self, tokens_BT: Tensor, step: Step, depth: int | None = None) -> Tensor:
        """Returns the stream (B, T, M) after `depth` blocks, None for all of them."""
        if self.relative is not None:
            step.relative_BH = self.relative.weight
        said = self.vision.spoken(tokens_BT, self.spec.n_vocab) if isinstance(self.vision, Vision) else tokens_BT
        x_BTM = self.embedding(said, step)
        if step.images_NPM is not None:
            assert isinstance(self.vision, Vision)
            x_BTM = self.vision.put(x_BTM, tokens_BT, step.images_NPM, step)
        if self.positions is not None:
            x_BTM = x_BTM + self.positions(step)
        if self.types is not None:
            types_BT = torch.zeros_like(tokens_BT) if step.types_BT is None else step.types_BT
            x_BTM = x_BTM + self.types(types_BT)
        if self.embedding_norm is not None:
            x_BTM = self.embedding_norm(x_BTM)
        for block in self.blocks[:depth]:
            x_BTM = block(x_BTM, step)
        return x_BTM

    def begin(
        self,
        shape: tuple[int, int],
        device: torch.device,
        cache: Cache | None,
        valid_BT: Tensor | None,
        kernel: Kernel,
        reach: tuple[int, ...] | None = None,
    ) -> Step:
        """Returns the step for (B, T) tokens, the cache's lengths already moved on."""
        past = None if cache is None else cache.lengths
        step = Step(shape, device, past=past, valid_BT=valid_BT, cache=cache, kernel=kernel, reach=reach)
        if cache is not None:
            cache.advance(step.lengths)
        return step

    def read_again(self, cache: Cache, step: Step) -> None:
        """Fills those rows of the cache anew whose rotary frequencies are no longer what they were cached under.

        One row after the other, each as if it were alone, in the pieces that the cache allows: a row costs a prefill
        of its past. A layer's keys depend on what the layers before it made, so turning them again is not enough.
        """
        for row in cache.outdated(step.past, step.reach):
            tokens_1T, types_1T, images_NPM, alone = cache.row(row, step.past[row])
            size = cache.chunk if cache.chunk and images_NPM is None else step.past[row]
            for start in range(0, step.past[row], size):
                part = slice(start, start + size)
                shape, reach = (1, tokens_1T[:, part].shape[1]), (step.reach[row],)
                inner = self.begin(shape, step.device, alone, None, step.kernel, reach)
                inner.types_BT = None if types_1T is None else types_1T[:, part]
                inner.images_NPM = images_NPM
                inner.source_mask = source_mask(alone.source_valid_BS)
                self.stream(tokens_1T[:, part], inner)

    def images_by_row(self, tokens_BT: Tensor, step: Step) -> list[Tensor] | None:
        """Returns the images that the pass has put into each row (n, P, M), None without any."""
        if step.images_NPM is None:
            return None
        assert isinstance(self.vision, Vision)
        counts = (tokens_BT == self.vision.part.placeholder).sum(1) // self.vision.part.n_tokens
        return [*step.images_NPM.split(counts.tolist())]


def source_mask(valid_BS: Tensor | None) -> Tensor | None:
    """Returns which tokens of a source are seen, as attention takes it; None for all of them."""
    return None if valid_BS is None else valid_BS[:, None, None, :]


def last_token(x_BTM: Tensor, valid_BT: Tensor | None) -> Tensor:
    """Returns (B, 1, M): each row's last real token."""
    if valid_BT is None:
        return x_BTM[:, -1:]
    places = torch.arange(valid_BT.shape[1], device=x_BTM.device)
    index = torch.where(valid_BT, places, -1).amax(1).clamp(min=0)
    return x_BTM[torch.arange(len(index), device=x_BTM.device), index][:, None]


def first_token(x_BTM: Tensor, valid_BT: Tensor | None) -> Tensor:
    """Returns (B, 1, M): each row's first real token, a copy, so that the others need not be kept for it."""
    if valid_BT is None:
        return x_BTM[:, :1].clone()
    index = valid_BT.int().argmax(1)
    return x_BTM[torch.arange(len(index), device=x_BTM.device), index][:, None]


MODULES: dict[type[Part], Callable[..., nn.Module]] = {
    model.TokenEmbedding: TokenEmbedding,
    model.SharedEmbedding: SharedEmbedding,
    positions.LearnedPositions: LearnedPositions,
    encoder.TypeEmbedding: TypeEmbedding,
    encoder.Pooler: Pooler,
    positions.Sinusoids: Sinusoids,
    norms.RMSNorm: RMSNorm,
    norms.LayerNorm: LayerNorm,
    attention.Attention: Attention,
    latent.LatentAttention: latent_attention,
    cross.CrossAttention: CrossAttention,
    feedforward.MLP: MLP,
    feedforward.GatedMLP: GatedMLP,
    experts.MixtureOfExperts: mixture,
    model.Head: Head,
    model.TiedHead: Head,
    model.Parallel: Parallel,
    model.Predictor: Predictor,
    model.Model: Model,
    vision.PatchEmbedding: PatchEmbedding,
    vision.Classifier: OneToken,
    vision.Projection: OneToken,
    vision.MLPProjector: mlp_projector,
    vision.PooledProjector: pooled_projector,
    vision.Vision: multimodal,
    vision.Contrast: contrast,
}


def module(part: Part, path: str) -> nn.Module:
    """Returns the module of `part`, its parameters uninitialised."""
    return MODULES[type(part)](part, path)


def norm(part: norms.Norm | None, path: str) -> nn.Module | None:
    """Returns the module of a norm, or None where there is none."""
    return None if part is None else module(part, path)
