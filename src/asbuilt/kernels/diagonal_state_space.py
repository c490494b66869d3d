"""The diagonal state space: as one long convolution by Fourier transforms, and token by token as in its definition.

Shapes: batch B, tokens T, channels C, complex states N of a channel, pieces I of P tokens each; x (B, T, C), decays a
(C, N), what x adds to the states b (C, N), what reads them c (C, N), the states s (B, C, N). Numbers of float32 or
wider. Gu et al. 2022 (arXiv 2206.11893), section 3.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class System(NamedTuple):
    """dt A and (e^(dt A) - 1)/A of each state, and what reads it, complex (C, N)."""

    log_a: Tensor
    b: Tensor
    c: Tensor


def system(a_log: Tensor, a_im: Tensor, c_re: Tensor, c_im: Tensor, log_dt: Tensor) -> System:
    """Returns the discrete system (zero-order hold) of the learned numbers, in float32 or wider."""
    wide = torch.promote_types(a_log.dtype, torch.float32)
    a_log, a_im, c_re, c_im, log_dt = (one.to(wide) for one in (a_log, a_im, c_re, c_im, log_dt))
    a = torch.complex(-a_log.exp(), a_im)
    log_a = a * log_dt.exp()[:, None]
    return System(log_a, torch.expm1(log_a) / a, torch.complex(c_re, c_im))


def by_transforms(x_BTC: Tensor, of: System, pieces: tuple[int, int]) -> Tensor:
    """Returns y (B, T, C): x convolved with the system's kernel, padded so that nothing wraps around."""
    T = x_BTC.shape[1]
    kernel_CT = kernel(of, pieces)[:, :T]
    spectrum = torch.fft.rfft(x_BTC.transpose(1, 2), n=2 * T)
    return torch.fft.irfft(spectrum * torch.fft.rfft(kernel_CT, n=2 * T), n=2 * T)[:, :, :T].transpose(1, 2)


def kernel(of: System, pieces: tuple[int, int]) -> Tensor:
    """Returns 2 Re(sum over n of c b e^(l log_a)), (C, I * P): powers of whole pieces times powers within one."""
    size, n = pieces
    whole_CIN = powers(of.log_a * size, n).transpose(1, 2) * (2 * of.c * of.b)[:, None]
    inside_CNP = powers(of.log_a, size)
    left = torch.cat((whole_CIN.real, -whole_CIN.imag), 2)
    return torch.bmm(left, torch.cat((inside_CNP.real, inside_CNP.imag), 1)).flatten(1)


def powers(log_CN: Tensor, count: int) -> Tensor:
    """Returns e^(i log) for i < count, (C, N, count); their real parts are at most 0, so nothing overflows."""
    return (log_CN[..., None] * torch.arange(count, dtype=log_CN.real.dtype, device=log_CN.device)).exp()


def at_end(x_BTC: Tensor, of: System, pieces: tuple[int, int]) -> Tensor:
    """Returns the states after the last token (B, C, N) of a text without a past, piece by piece."""
    (size, n), (B, T, C) = pieces, x_BTC.shape
    padded = torch.cat((x_BTC.new_zeros(B, size * n - T, C), x_BTC), 1)  # zeros before the text change nothing
    x_CXP = padded.unflatten(1, (n, size)).permute(3, 0, 1, 2).reshape(C, B * n, size)
    weights_CPN = powers(of.log_a, size).flip(2).transpose(1, 2)
    made = torch.bmm(x_CXP, torch.cat((weights_CPN.real, weights_CPN.imag), 2)).view(C, B, n, 2, -1)
    left_CIN = powers(of.log_a * size, n).flip(2).transpose(1, 2)
    own = torch.complex(made[:, :, :, 0], made[:, :, :, 1])
    return (own * left_CIN[:, None]).sum(2).transpose(0, 1) * of.b


def by_tokens(x_BTC: Tensor, of: System, valid_BT: Tensor | None, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns (y (B, T, C), the states after the last token); padding leaves states as they are."""
    a = of.log_a.exp()
    s = a.new_zeros(len(x_BTC), *a.shape) if state is None else state
    made = []
    for t, x_BC in enumerate(x_BTC.unbind(1)):
        after = a * s + of.b * x_BC[..., None]
        s = after if valid_BT is None else torch.where(valid_BT[:, t, None, None], after, s)
        made.append(2 * (of.c * s).sum(-1).real)
    return torch.stack(made, 1), s
