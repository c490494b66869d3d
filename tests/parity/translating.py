"""Parity of encoder-decoders: both stacks are traced, and one source of the batch is padded on the right."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from harness import TOKENS, Inputs, Kind, Trace, random_tokens
from torch import Tensor, nn
from transformers import AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedModel

from asbuilt.nn.encoder_decoder import EncoderDecoder as Built
from asbuilt.nn.model import Model
from asbuilt.spec import EncoderDecoder
from asbuilt.spec import Model as ModelSpec
from asbuilt.spec.part import Kernel

PADDED = TOKENS // 3


class Translating(Kind):
    """Models that read one text and write another, which predict its next token."""

    decodes = False  # with the harness's decoder-only calls; test_translators.py has its own

    def make(self, config: PreTrainedConfig) -> PreTrainedModel:
        """Returns transformers' model of the config."""
        return AutoModelForSeq2SeqLM.from_config(config)

    def load(self, folder: Path, **settings: object) -> Any:  # noqa: ANN401  # a model, or a model and what was amiss
        """Returns what transformers' `from_pretrained` gives with these settings."""
        return AutoModelForSeq2SeqLM.from_pretrained(folder, **settings)

    def inputs(self, rng: Random, spec: ModelSpec) -> Inputs:
        """Returns a source with its mask, and a text."""
        assert isinstance(spec, EncoderDecoder)
        source = random_tokens(rng, spec.encoder.n_vocab)
        mask = torch.ones_like(source)
        mask[rng.randrange(len(mask)), -PADDED:] = 0
        written = random_tokens(rng, spec.n_vocab)
        return {"input_ids": source, "attention_mask": mask, "decoder_input_ids": written}

    @torch.inference_mode()
    def theirs(self, model: PreTrainedModel, inputs: Inputs) -> Trace:
        """Returns both stacks' streams before the blocks, after each, the last one normed, and logits."""
        out: Any = model(**inputs, output_hidden_states=True, use_cache=False)
        real = inputs["attention_mask"].bool()
        read = {path: _only(real, x) for path, x in named("encoder.", out.encoder_hidden_states).items()}
        return read | named("", out.decoder_hidden_states) | {"head": out.logits}

    @torch.inference_mode()
    def ours(self, model: Model, inputs: Inputs, kernel: Kernel = "fused") -> Trace:
        """Returns the same of our model, seen by hooks on its modules."""
        trace: Trace = {}
        assert isinstance(model, Built)
        real = inputs["attention_mask"].bool()
        seen = [*hooks(model.encoder, "encoder.", trace), *hooks(model, "", trace)]
        try:
            trace["head"] = model(
                inputs["decoder_input_ids"], source_BS=inputs["input_ids"], source_valid_BS=real, kernel=kernel
            )
        finally:
            for hook in seen:
                hook.remove()
        return {path: _only(real, x) if path.startswith("encoder.") else x for path, x in trace.items()}


TRANSLATING = Translating()


def named(place: str, hidden_states: tuple[Tensor, ...]) -> Trace:
    """Returns the streams of a stack by their paths."""
    first, *blocks, normed = hidden_states
    stream = {f"{place}blocks.{i}": hidden for i, hidden in enumerate(blocks)}
    return {f"{place}embedding": first, **stream, f"{place}norm": normed}


def _only(real_BS: Tensor, x_BSM: Tensor) -> Tensor:
    """Padding is nobody's, and each side may put there what it likes."""
    return x_BSM.masked_fill(~real_BS[:, :, None], 1.0)


def hooks(stack: Model, place: str, trace: Trace) -> list[Any]:
    """Returns hooks that keep the same of our stack in the trace."""

    def keep(path: str, module: nn.Module, args: tuple[Tensor, ...], result: Tensor) -> None:
        trace[path] = result

    def keep_input(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        trace[f"{place}embedding"] = args[0]

    last = stack.blocks[-1] if stack.norm is None else stack.norm
    inner = [(f"{place}blocks.{i}", block) for i, block in enumerate(stack.blocks[:-1])]
    named = [*inner, (f"{place}norm", last)]
    kept = [module.register_forward_hook(partial(keep, path)) for path, module in named]
    return [stack.blocks[0].register_forward_pre_hook(keep_input), *kept]
