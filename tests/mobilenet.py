"""MobileNet-V5 written anew in plain PyTorch, channels first, under timm's names: what transformers wraps as a tower.

Held to timm itself where that is installed (tests/families/test_mobilenet_timm.py); parity tests need it not.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModel, Gemma3nVisionConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from asbuilt.families.shared.mobilenet import NETWORKS, Attentive, Edge, Inverted, Network

# A network small enough to be computed hundreds of times, with all kinds of blocks; its patches are means of squares.
SMALL = "mobilenetv5_small_enc"
NETWORKS[SMALL] = Network(
    image_size=32,
    stem=5,
    stages=(
        (4, (Edge(expand=2, stride=2), Edge(expand=2))),
        (5, (Inverted(start=3, middle=5, expand=2, stride=2), Attentive(n_heads=3, d_head=2, stride=2))),
        (6, (Inverted(start=5, expand=3, stride=2), Attentive(n_heads=2, d_head=4), Inverted(expand=2))),
    ),
    d_model=8,
    n_side=2,
    eps=0.2,
)


class Norm(nn.Module):
    """RMSNorm over channels."""

    def __init__(self, channels: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(channels)), eps

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(1, keepdim=True) + self.eps).sqrt() * self.weight[:, None, None]


class Conv(nn.Conv2d):
    """A convolution with zeros around, more of them below and on the right where their number is odd."""

    def __init__(
        self, inside: int, out: int, kernel: int, stride: int = 1, groups: int = 1, bias: bool = False
    ) -> None:
        super().__init__(inside, out, kernel, stride, groups=groups, bias=bias)

    def forward(self, input: Tensor) -> Tensor:
        kernel, stride = self.kernel_size[0], self.stride[0]
        more = max(0, (-(-input.shape[-1] // stride) - 1) * stride + kernel - input.shape[-1])
        edges = (more // 2, more - more // 2)
        return super().forward(F.pad(input, edges * 2))


class ConvNorm(nn.Module):
    """A convolution, its norm, and GELU or not."""

    def __init__(self, conv: Conv, eps: float, activated: bool) -> None:
        super().__init__()
        self.conv, self.bn, self.activated = conv, Norm(conv.out_channels, eps), activated

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.conv(x))
        return F.gelu(x, approximate="tanh") if self.activated else x


class Scale(nn.Module):
    """A factor for each channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma[:, None, None]


class EdgeBlock(nn.Module):
    def __init__(self, said: Edge, inside: int, out: int, eps: float) -> None:
        super().__init__()
        wide, self.added = inside * said.expand, said.stride == 1 and inside == out
        self.conv_exp, self.bn1 = Conv(inside, wide, 3, said.stride), Norm(wide, eps)
        self.conv_pwl, self.bn2 = Conv(wide, out, 1), Norm(out, eps)

    def forward(self, x: Tensor) -> Tensor:
        made = self.bn2(self.conv_pwl(F.gelu(self.bn1(self.conv_exp(x)), approximate="tanh")))
        return made + x if self.added else made


class InvertedBlock(nn.Module):
    def __init__(self, said: Inverted, inside: int, out: int, eps: float, scaled: bool = True) -> None:
        super().__init__()
        wide, stride = inside * said.expand, said.stride
        self.added = scaled and stride == 1 and inside == out
        if said.start:
            first = 1 if said.middle else stride
            self.dw_start = ConvNorm(Conv(inside, inside, said.start, first, inside), eps, False)
        self.pw_exp = ConvNorm(Conv(inside, wide, 1), eps, True)
        if said.middle:
            self.dw_mid = ConvNorm(Conv(wide, wide, said.middle, stride, wide), eps, True)
        self.pw_proj = ConvNorm(Conv(wide, out, 1), eps, False)
        if scaled:
            self.layer_scale = Scale(out)

    def forward(self, x: Tensor) -> Tensor:
        made = x
        for step in self.children():
            made = step(made)
        return made + x if self.added else made


class Multi(nn.Module):
    def __init__(self, said: Attentive, width: int, eps: float) -> None:
        super().__init__()
        self.said = said
        self.query, self.output = nn.Sequential(), nn.Sequential()
        self.query.add_module("proj", nn.Conv2d(width, said.n_heads * said.d_head, 1, bias=False))
        self.key, self.value = nn.Sequential(), nn.Sequential()
        for one in (self.key, self.value):
            if said.stride > 1:
                one.add_module("down_conv", Conv(width, width, 3, said.stride, width))
                one.add_module("norm", Norm(width, eps))
            one.add_module("proj", nn.Conv2d(width, said.d_head, 1, bias=False))
        self.output.add_module("proj", nn.Conv2d(said.n_heads * said.d_head, width, 1, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        q = self.query(x).flatten(2).unflatten(1, (self.said.n_heads, self.said.d_head))
        scores = torch.einsum("nhdp,nds->nhps", q, self.key(x).flatten(2)) / self.said.d_head**0.5
        mixed = torch.einsum("nhps,nds->nhdp", scores.softmax(-1), self.value(x).flatten(2))
        return self.output(mixed.flatten(1, 2).unflatten(2, x.shape[-2:]))


class AttentiveBlock(nn.Module):
    def __init__(self, said: Attentive, width: int, eps: float) -> None:
        super().__init__()
        self.norm, self.attn, self.layer_scale = Norm(width, eps), Multi(said, width, eps), Scale(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer_scale(self.attn(self.norm(x)))


class Fusion(nn.Module):
    def __init__(self, inside: int, said: Network) -> None:
        super().__init__()
        self.ffn = InvertedBlock(Inverted(expand=2), inside, said.d_model, said.eps, scaled=False)
        self.norm, self.side = Norm(said.d_model, said.eps), said.n_side

    def forward(self, early: Tensor, late: Tensor) -> Tensor:
        both = torch.cat((early, F.interpolate(late, size=early.shape[-2:], mode="nearest")), 1)
        return self.norm(F.avg_pool2d(self.ffn(both), early.shape[-1] // self.side))


class Encoder(nn.Module):
    """The whole network: images (N, C, H, W) to (N, d_model, n_side, n_side)."""

    def __init__(self, said: Network) -> None:
        super().__init__()
        self.conv_stem = ConvNorm(Conv(3, said.stem, 3, 2, bias=True), said.eps, True)
        self.blocks, width = nn.Sequential(), said.stem
        for out, stage in said.stages:
            made = nn.Sequential()
            for one in stage:
                if isinstance(one, Attentive):
                    made.append(AttentiveBlock(one, width, said.eps))
                else:
                    kind: Any = EdgeBlock if isinstance(one, Edge) else InvertedBlock
                    made.append(kind(one, width, out, said.eps))
                width = out
            self.blocks.append(made)
        self.msfa = Fusion(said.stages[-2][0] + said.stages[-1][0], said)

    def forward(self, pixels: Tensor) -> Tensor:
        x, left = self.conv_stem(pixels), []
        for stage in self.blocks:
            x = stage(x)
            left.append(x)
        return self.msfa(*left[-2:])


class Tower(PreTrainedModel):
    """The network as transformers wraps timm's."""

    config_class = Gemma3nVisionConfig

    def __init__(self, config: Gemma3nVisionConfig) -> None:
        super().__init__(config)
        self.timm_model = Encoder(NETWORKS[config.architecture])
        self.post_init()

    def forward(self, pixel_values: Tensor, **unused: object) -> BaseModelOutputWithPooling:
        return BaseModelOutputWithPooling(last_hidden_state=self.timm_model(pixel_values))

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: every weight is drawn or loaded."""


AutoModel.register(Gemma3nVisionConfig, Tower, exist_ok=True)
