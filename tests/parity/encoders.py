"""Encoders in parity: ragged texts padded on the right, token types, a masked language model's head or the pooler."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers
from harness import Inputs, Kind, Trace, random_tokens, traced
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from asbuilt.nn.model import Model
from asbuilt.nn.text_encoder import TextEncoder as Built
from asbuilt.spec import LearnedPositions, TextEncoder
from asbuilt.spec import Model as ModelSpec
from asbuilt.spec.part import Kernel


class Encoder(Kind):
    """The class is the one that `architectures` names, without a pooler where `add_pooling_layer` says so."""

    decodes = False

    def make(self, config: PreTrainedConfig) -> PreTrainedModel:
        """Returns transformers' model of the config."""
        kind, settings = _class(config)
        return kind(config, **settings)

    def load(self, folder: Path, **settings: object) -> Any:  # noqa: ANN401  # a model, or a model and what was amiss
        """Returns what transformers' `from_pretrained` gives."""
        config = AutoConfig.from_pretrained(folder)
        kind, own = _class(config)
        config.__dict__.pop("add_pooling_layer", None)  # else transformers sets it in the config, where none reads it
        return kind.from_pretrained(folder, config=config, **settings, **own)

    def inputs(self, rng: Random, spec: ModelSpec) -> Inputs:
        """Returns texts of two lengths and which tokens are real; no real one is the padding token."""
        padding = max(spec.positions.offset - 1, 0) if isinstance(spec.positions, LearnedPositions) else 0
        drawn = random_tokens(rng, spec.n_vocab - 1)
        tokens = drawn + (drawn >= padding)
        valid = torch.ones_like(tokens)
        valid[1, rng.randrange(tokens.shape[1] // 2, tokens.shape[1]) :] = 0
        inputs = {"input_ids": torch.where(valid == 1, tokens, padding), "attention_mask": valid}
        assert isinstance(spec, TextEncoder)
        return inputs if spec.types is None else inputs | {"token_type_ids": random_tokens(rng, spec.types.n_types)}

    @torch.inference_mode()
    def theirs(self, model: PreTrainedModel, inputs: Inputs) -> Trace:
        """Returns the stream, the last one normed, then logits or the pooled vectors; padding counts for nothing."""
        out: Any = model(**inputs, output_hidden_states=True)
        first, *blocks, normed = out.hidden_states
        trace = {"embedding": first, **{f"blocks.{i}": hidden for i, hidden in enumerate(blocks)}, "norm": normed}
        if "start_logits" in out:
            trace["head"] = torch.stack((out.start_logits, out.end_logits), -1)
        if "logits" in out:
            single = type(model).__name__ == "ElectraForPreTraining"  # one label of each token, without a dimension
            trace["head"] = out.logits[..., None] if single else out.logits
        return _real(trace, inputs) | _pooled(out.get("pooler_output"))

    @torch.inference_mode()
    def ours(self, model: Model, inputs: Inputs, kernel: Kernel = "fused") -> Trace:
        """Returns the same of our model."""
        tokens, valid = inputs["input_ids"], inputs["attention_mask"] == 1
        given = {"valid_BT": valid, "types_BT": inputs.get("token_type_ids")}
        ends: list[Any] = []
        with_end = model.blocks[-1].register_forward_hook(lambda module, args, result: ends.append(result))
        found = traced(model, lambda: model(tokens, **given, kernel=kernel))
        with_end.remove()
        if model.spec.gives == "labels":  # which may be of one token alone
            found["norm"] = model.normed(ends[0])
        trace = _real(found, inputs)
        assert isinstance(model, Built)
        return trace | _pooled(None if model.pooler is None else model.pooled(tokens, **given, kernel=kernel))


def _class(config: PreTrainedConfig) -> tuple[Any, dict[str, bool]]:
    (name,) = config.architectures or []
    pooled = getattr(config, "add_pooling_layer", True)
    return getattr(transformers, name), {} if pooled else {"add_pooling_layer": False}


def _real(trace: Trace, inputs: Inputs) -> Trace:
    """Ones where a token is padding; the labels of a text at each of its tokens."""
    padding = inputs["attention_mask"][:, :, None] == 0
    tokens = {path: x if x.ndim == 3 else x[:, None].expand(-1, padding.shape[1], -1) for path, x in trace.items()}
    real = {path: hidden.masked_fill(padding, 1.0) for path, hidden in tokens.items()}
    # one number of each token, which may be near 0, counts beside those of the whole text
    return {path: x.transpose(1, 2).expand(-1, x.shape[1], -1) if x.shape[2] == 1 else x for path, x in real.items()}


def _pooled(pooled_BM: Tensor | None) -> Trace:
    return {} if pooled_BM is None else {"pooler": pooled_BM[:, None]}


ENCODER = Encoder()
