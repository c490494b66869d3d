"""MobileNet-V5 beside timm's, where that is installed: names, shapes and results of ours, and of the tests' own."""

from __future__ import annotations

import pytest
import torch

from asbuilt.families.shared import mobilenet
from asbuilt.nn import build
from asbuilt.nn.build import stored_tensors

NAME = "mobilenetv5_300m_enc"


@torch.no_grad()
def test_the_network_is_timms() -> None:
    timm = pytest.importorskip("timm")
    from mobilenet import Encoder

    theirs, said = timm.create_model(NAME, pretrained=False).eval(), mobilenet.NETWORKS[NAME]
    for name, weight in theirs.named_parameters():
        spread = 0.3 if weight.ndim == 1 else weight[0].numel() ** -0.5
        weight.copy_(spread * torch.randn_like(weight) + (weight.ndim == 1 and "gamma" not in name))
    stored = theirs.state_dict()
    plain = Encoder(said).eval()
    plain.load_state_dict(stored)
    tower = mobilenet.tower(said)
    mine = build(tower).eval()
    own = stored_tensors(mine)
    for one in mobilenet.entries(mobilenet.network(said), "embedding.", ""):
        for path, tensor in zip(one.paths, one.layout.load([stored.pop(name) for name in one.names]), strict=True):
            own.pop(path).copy_(tensor)
    assert not own
    assert not stored
    pixels = torch.rand(1, 3, said.image_size, said.image_size)
    want = theirs(pixels)
    torch.testing.assert_close(plain(pixels), want, rtol=0, atol=1e-4)
    torch.testing.assert_close(mine(pixels), want.flatten(2).transpose(1, 2), rtol=0, atol=1e-4)
