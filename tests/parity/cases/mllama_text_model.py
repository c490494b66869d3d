"""mllama_text_model: texts alone, in which layers of cross-attention are passed over."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, cast

import torch
from drawn import draw as text
from drawn import yarn
from harness import Draw, Inputs, Kind, ParityCase, Trace
from torch import Tensor, nn
from transformers import MllamaForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.mllama import MllamaTextConfig

from asbuilt.nn.model import Model
from asbuilt.spec.part import Kernel


class Alone(Kind):
    """A class that no automatic class of transformers knows; it does not run the layers that are passed over."""

    def make(self, config: PreTrainedConfig) -> PreTrainedModel:
        """Returns transformers' model of the config."""
        return MllamaForCausalLM(config)  # type: ignore[arg-type]  # pyright: ignore

    def load(self, folder: Path, **settings: object) -> Any:  # noqa: ANN401  # as the kind it overrides
        """Returns what `from_pretrained` gives."""
        return MllamaForCausalLM.from_pretrained(folder, **settings)  # type: ignore[arg-type]

    def theirs(self, model: PreTrainedModel, inputs: Inputs) -> Trace:
        """The stream after each layer that runs, and the logits."""
        run = lambda: cast(Any, model)(inputs["input_ids"], use_cache=False).logits  # noqa: E731
        return _traced(cast(Any, model).model.layers, "cross_attn", run)

    def ours(self, model: Model, inputs: Inputs, kernel: Kernel = "fused") -> Trace:
        """The same of our model."""
        return _traced(model.blocks, "cross", lambda: model(inputs["input_ids"], kernel=kernel))


@torch.inference_mode()
def _traced(layers: Iterable[nn.Module], passed: str, run: Callable[[], Tensor]) -> Trace:
    """The stream after each of the layers that lack a module `passed`, and what `run` gives."""
    trace: Trace = {}

    def keep(i: int, module: nn.Module, args: tuple[Any, ...], result: Tensor) -> None:
        trace[f"blocks.{i}"] = result

    running = [(i, layer) for i, layer in enumerate(layers) if not hasattr(layer, passed)]
    hooks = [layer.register_forward_hook(partial(keep, i)) for i, layer in running]
    trace["head"] = run()
    for hook in hooks:
        hook.remove()
    return trace


def reading(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config with three layers, the middle one of which reads an image."""
    config.num_hidden_layers, config.cross_attention_layers = 3, [1]
    return config


def draw(rng: Random, drawn: Draw) -> PreTrainedConfig:
    """A config as `drawn`, but for that."""
    return reading(drawn(rng))


SAME: dict[str, Any] = {"kind": MllamaTextConfig, "tie_word_embeddings": False, "bos_token_id": 1}
CONFIGS: dict[str, Draw] = {
    "usual": partial(draw, drawn=partial(text, **SAME)),
    "yarn": partial(draw, drawn=partial(yarn, **SAME)),
}
CASE = ParityCase(
    family="mllama_text_model",
    configs=CONFIGS,
    kind=Alone(),
    idle=("blocks.1.",),
    inert_fields={
        f"blocks.{i}.{name}.after_source": "no token comes before an image here"
        for i in (0, 2)
        for name in ("attention", "ffn")
    },
    attentions=("eager",),
)
