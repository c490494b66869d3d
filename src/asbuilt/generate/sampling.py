"""Sampling the next token: a request's settings, the transforms of the logits, and the draw.

Each transform is a separate function and equals the transformers processor of the same name; kept logits are unchanged,
dropped ones become -inf. Shapes: batch B, vocabulary V.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from asbuilt.errors import InputError

NEVER = -math.inf
# Top-p sorts only this many of the most likely tokens if they reach p: sorting a vocabulary takes 5 ms, these 0.3 ms.
CANDIDATES = 1024


@dataclass(frozen=True, kw_only=True)
class Times:
    """Which tokens say times in a speech model's text: those from `begin` on, each 20 ms after the one before it.

    The token before `begin` is for no times; `end` ends a text, and only it and times come after it. `latest` is the
    last that the first time may be, None for any. Radford et al. 2022 (Whisper, arXiv 2212.04356), section 2.3.
    """

    begin: int
    end: int
    latest: int | None = None

    def seconds(self, token: int) -> float | None:
        """Returns the time that a token says; None if it says none."""
        return None if token < self.begin else (token - self.begin) / 50


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How one request samples its tokens; temperature 0 is greedy, None disables a transform.

    With `times` the text has times around its segments. Tokens in `suppress` are never chosen, those in
    `suppress_first` not as the first one after the prompt. Raises InputError for a value out of range. Equal seeds and
    equal logits give equal tokens, whatever else runs.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int = 0
    suppress: tuple[int, ...] = ()
    suppress_first: tuple[int, ...] = ()
    times: Times | None = None

    def __post_init__(self) -> None:
        # beyond these bounds float32 logits overflow, and the probabilities become NaN
        if self.temperature != 0:
            _require("temperature", self.temperature, 1e-6, 10**6, other="0 (greedy), or ")
        _require("repetition_penalty", self.repetition_penalty, 1e-3, 1000)
        for field in ("top_p", "min_p"):
            if getattr(self, field) is not None:
                _require(field, getattr(self, field), 0, 1)
        if self.top_k is not None:
            _require("top_k", self.top_k, 1, 2**31 - 1, whole=True)
        _require("seed", self.seed, 0, 2**63 - 1, whole=True)
        for field in ("suppress", "suppress_first"):
            said = getattr(self, field)
            if not isinstance(said, tuple) or not all(type(token) is int and token >= 0 for token in said):
                raise InputError(field=field, value=said, allowed="a tuple of token ids")


def _require(field: str, value: float, low: float, high: float, *, whole: bool = False, other: str = "") -> None:
    number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not (number and low <= value <= high):  # false for NaN too
        allowed = f"{other}{'a whole number' if whole else 'a number'} from {low} to {high}"
        raise InputError(field=field, value=value, allowed=allowed)


def penalise_repetition(logits_BV: Tensor, seen_BV: Tensor, penalty: float) -> Tensor:
    """Returns the logits with those of seen tokens lowered: l / penalty, or l * penalty where l < 0.

    Keskar et al. 2019 (arXiv 1909.05858), with transformers' treatment of negative logits.
    """
    penalised = torch.where(logits_BV < 0, logits_BV * penalty, logits_BV / penalty)
    return torch.where(seen_BV, penalised, logits_BV)


def suppressed(logits_BV: Tensor, sampling: Sampling, *, first: bool) -> Tensor:
    """Returns the logits with those of suppressed tokens dropped; `first` is the one after the prompt."""
    said = {*sampling.suppress, *(sampling.suppress_first if first else ())}
    tokens = [token for token in said if token < logits_BV.shape[-1]]
    return logits_BV.index_fill(-1, torch.tensor(tokens, device=logits_BV.device), NEVER) if tokens else logits_BV


def timed(logits_BV: Tensor, times: Times, texts: Sequence[Sequence[int]]) -> Tensor:
    """Returns the logits with tokens dropped that cannot follow each row's new text, where times stand in pairs.

    A text begins with a time. One that ends a segment is followed by the time at which the next one begins, not
    earlier, or by the end; else times grow. If all times together are more likely than any other token, one of them
    comes.
    """
    logits_BV, begin = logits_BV.clone(), times.begin
    logits_BV[:, begin - 1] = NEVER
    for row_V, text in zip(logits_BV, texts, strict=True):
        said = [token for token in text if token >= begin]
        last = len(text) > 0 and text[-1] >= begin
        paired = len(text) < 2 or text[-2] >= begin
        if last:
            row_V[slice(begin, None) if paired else slice(times.end)] = NEVER
        if said:
            row_V[begin : said[-1] + (0 if last and not paired else 1)] = NEVER
        if not text:
            row_V[:begin] = NEVER
            if times.latest is not None:
                row_V[begin + times.latest + 1 :] = NEVER
        logs_V = row_V.float().log_softmax(-1)
        if bool(logs_V[begin:].logsumexp(-1) > logs_V[:begin].max()):
            row_V[:begin] = NEVER
    return logits_BV


def divide_by_temperature(logits_BV: Tensor, temperature: float) -> Tensor:
    """Returns l / temperature."""
    return logits_BV / temperature


def keep_top_k(logits_BV: Tensor, k: int) -> Tensor:
    """Returns the logits with those below the k-th largest dropped; ties with the k-th are kept."""
    kth = logits_BV.topk(min(k, logits_BV.shape[-1])).values[..., -1:]
    return logits_BV.masked_fill(logits_BV < kth, NEVER)


def keep_top_p(logits_BV: Tensor, p: float) -> Tensor:
    """Returns the logits with the smallest ones dropped, as long as their total probability is at most 1 - p.

    Holtzman et al. 2019 (arXiv 1904.09751). The largest is always kept. Sums are in the logits' dtype, so over a large
    vocabulary rounding decides about tokens within about 1e-6 of the threshold.
    """
    if logits_BV.shape[-1] > CANDIDATES:
        probabilities, order = logits_BV.softmax(-1).topk(CANDIDATES)
        below = 1 - probabilities.sum(-1, keepdim=True)
        if bool((below <= 1 - p).all()):  # the threshold lies among the candidates
            drop = below + probabilities.flip(-1).cumsum(-1) <= 1 - p
            drop[..., -1] = False
            kept = logits_BV.gather(-1, order).masked_fill(drop.flip(-1), NEVER)
            return torch.full_like(logits_BV, NEVER).scatter(-1, order, kept)
    ascending, order = logits_BV.sort(-1)
    drop = ascending.softmax(-1).cumsum(-1) <= 1 - p
    drop[..., -1] = False
    return logits_BV.masked_fill(drop.scatter(-1, order, drop), NEVER)


def keep_min_p(logits_BV: Tensor, p: float) -> Tensor:
    """Returns the logits without tokens less than p times as likely as the most likely (arXiv 2407.01082)."""
    probabilities = logits_BV.softmax(-1)
    return logits_BV.masked_fill(probabilities < p * probabilities.amax(-1, keepdim=True), NEVER)


def transform(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """Returns the logits to sample from: temperature, then top-k, top-p and min-p, each if enabled."""
    logits_BV = divide_by_temperature(logits_BV, sampling.temperature)
    if sampling.top_k is not None:
        logits_BV = keep_top_k(logits_BV, sampling.top_k)
    if sampling.top_p is not None and sampling.top_p < 1:
        logits_BV = keep_top_p(logits_BV, sampling.top_p)
    if sampling.min_p is not None:
        logits_BV = keep_min_p(logits_BV, sampling.min_p)
    return logits_BV


def draw(logits_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Returns, for each row, the token at which the cumulative probability exceeds `uniform_B` (0 to 1).

    Raises InputError if the logits do not define probabilities.
    """
    cumulative = logits_BV.softmax(-1).cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    if not bool(total.isfinite().all()):
        raise InputError("not finite", field="logits", fix="run the model in float32, or check its weights")
    # searching to the right skips tokens of zero probability
    return torch.searchsorted(cumulative, uniform_B[:, None].to(total.device) * total, right=True)[:, 0]


def seen_tokens(text: Sequence[int], n_vocab: int, device: torch.device | str) -> Tensor:
    """Returns which tokens of the vocabulary a text holds (V); it may hold others, which are never predicted."""
    seen_V = torch.zeros(n_vocab, dtype=torch.bool, device=device)
    seen_V[torch.tensor([token for token in text if token < n_vocab], dtype=torch.long, device=device)] = True
    return seen_V


class Sampler:
    """Samples one token per row of a batch; each row has its own settings and random numbers.

    A row draws one number per token from its own generator, on the CPU so that a seed means the same on every device.
    """

    def __init__(
        self,
        requests: Sequence[Sampling],
        prompts: Sequence[Sequence[int]],
        n_vocab: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self._requests = list(requests)
        self._generators = [torch.Generator().manual_seed(request.seed) for request in requests]
        self._seen_BV: Tensor | None = None
        self._first = True
        self._new: list[list[int]] = [[] for _ in requests]  # of each row, kept where its settings have times
        if any(request.repetition_penalty != 1 for request in requests):
            self._seen_BV = torch.zeros(len(prompts), n_vocab, dtype=torch.bool, device=device)
            for row, prompt in enumerate(prompts):
                self._seen_BV[row] = seen_tokens(prompt, n_vocab, device)
        self._group()

    def _group(self) -> None:
        """Groups rows with equal settings, to transform them together; a batch of only greedy rows needs no groups."""
        groups: dict[Sampling, list[int]] = {}
        for row, request in enumerate(self._requests):
            groups.setdefault(replace(request, seed=0), []).append(row)
        self._groups = list(groups.items())
        self._greedy = all(
            r.temperature == 0
            and r.repetition_penalty == 1
            and not r.suppress
            and not r.suppress_first
            and r.times is None
            for r in groups
        )

    def keep(self, rows: list[int]) -> None:
        """Continues with only these rows, in this order."""
        self._requests = [self._requests[row] for row in rows]
        self._generators = [self._generators[row] for row in rows]
        self._new = [self._new[row] for row in rows]
        if self._seen_BV is not None:
            self._seen_BV = self._seen_BV[rows]
        self._group()

    def __call__(self, logits_BV: Tensor) -> Tensor:
        """Returns the chosen tokens (B); raises InputError as `draw` does."""
        if self._greedy:
            return logits_BV.max(-1).indices  # equals argmax, in less than half the time
        chosen_B = torch.empty(len(logits_BV), dtype=torch.long, device=logits_BV.device)
        for settings, rows in self._groups:
            chosen_B[rows] = self._choose(logits_BV[rows], settings, rows)
            for row in rows if settings.times is not None else ():
                self._new[row].append(int(chosen_B[row]))
        self._first = False
        if self._seen_BV is not None:
            self._seen_BV.scatter_(1, chosen_B[:, None], True)
        return chosen_B

    def _choose(self, logits_BV: Tensor, settings: Sampling, rows: list[int]) -> Tensor:
        if logits_BV.dtype in (torch.bfloat16, torch.float16):
            logits_BV = logits_BV.float()
        if settings.repetition_penalty != 1 and self._seen_BV is not None:
            logits_BV = penalise_repetition(logits_BV, self._seen_BV[rows], settings.repetition_penalty)
        logits_BV = suppressed(logits_BV, settings, first=self._first)
        if settings.times is not None:
            logits_BV = timed(logits_BV, settings.times, [self._new[row] for row in rows])
        if settings.temperature == 0:
            return logits_BV.max(-1).indices  # equals argmax, in less than half the time
        uniform = [torch.rand((), generator=self._generators[row], dtype=torch.float64) for row in rows]
        return draw(transform(logits_BV, settings), torch.stack(uniform))
