"""RoPE by the centres of patches, beside its definition written out patch by patch."""

from __future__ import annotations

import math

import torch

from asbuilt.kernels.rotary import rotate, tables
from asbuilt.spec import Centres, Rotary


def test_patches_turn_by_their_centres_and_tokens_around_them_do_not() -> None:
    side, before, d, theta = 3, 2, 8, 7.0
    rotary = Rotary(d_rotary=d, theta=theta, axes=Centres(n_side=side, n_before=before))
    tokens = before + side**2 + 1
    x = torch.randn(1, tokens, 2, d, dtype=torch.float64)
    turned = rotate(x, tables(rotary, torch.arange(tokens)[None], (tokens,), torch.float64), "halves")
    around = [0, 1, tokens - 1]
    assert torch.equal(turned[:, around], x[:, around])
    for row in range(side):
        for column in range(side):
            token = before + side * row + column
            middles = [-1 + (2 * place + 1) / side for place in (row, column)]  # of `side` strips from -1 to 1
            for pair in range(d // 2):
                angle = middles[pair // 2] * 2 * math.pi / theta ** (pair % 2 * 4 / d)
                first, second = x[0, token, :, pair], x[0, token, :, pair + d // 2]
                wanted = first * math.cos(angle) - second * math.sin(angle)
                torch.testing.assert_close(turned[0, token, :, pair], wanted, rtol=0, atol=1e-12)
                wanted = second * math.cos(angle) + first * math.sin(angle)
                torch.testing.assert_close(turned[0, token, :, pair + d // 2], wanted, rtol=0, atol=1e-12)
