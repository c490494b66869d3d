"""The families akin to llama: what their own keys mean, what is refused, and that what is written reads back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from families_drawn import llama_configs
from hypothesis import given
from hypothesis import strategies as st

from asbuilt.errors import InputError
from asbuilt.families import families_that_write, gguf_table, read_config, tensor_table, write_config
from asbuilt.spec import Attention, Head, Model, Rotary, TiedHead, walk

SMALL = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "head_dim": 16,
}
AKIN = ("qwen2", "qwen3", "mistral", "smollm3", "olmo2", "olmo", "starcoder2", "cohere", "granite")
WINDOWED = ("qwen2", "qwen3", "smollm3")
FULL, SLIDING = "full_attention", "sliding_attention"


def spec_of(family: str, **changes: object) -> Model:
    return read_config(SMALL | {"model_type": family} | changes, "x").spec


def attentions(spec: Model) -> list[Attention]:
    return [part for _, part in walk(spec) if isinstance(part, Attention)]


def windows(spec: Model) -> list[int | None]:
    return [part.window for part in attentions(spec)]


def positions(spec: Model) -> list[bool]:
    return [isinstance(part.positions, Rotary) for part in attentions(spec)]


@pytest.mark.parametrize("family", ["mistral", "starcoder2"])
def test_one_window_for_all(family: str) -> None:
    assert windows(spec_of(family, sliding_window=8)) == [8] * 3
    assert windows(spec_of(family, sliding_window=None)) == [None] * 3
    assert windows(spec_of(family)) == [{"mistral": 4096, "starcoder2": None}[family]] * 3


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@given(first=st.integers(0, 5), used=st.booleans())
def test_windows_from_a_layer_on(family: str, first: int, used: bool) -> None:
    spec = spec_of(family, use_sliding_window=used, sliding_window=8, max_window_layers=first)
    assert windows(spec) == [8 if used and i >= first else None for i in range(3)]


@pytest.mark.parametrize("family", WINDOWED)
@given(kinds=st.lists(st.sampled_from([FULL, SLIDING]), min_size=3, max_size=3))
def test_layer_types_say_which(family: str, kinds: list[str]) -> None:
    spec = spec_of(family, use_sliding_window=True, sliding_window=8, layer_types=kinds)
    assert windows(spec) == [8 if kind == SLIDING else None for kind in kinds]


@given(layers=st.integers(1, 9), interval=st.integers(1, 10))
def test_layers_without_positions(layers: int, interval: int) -> None:
    spec = spec_of("smollm3", num_hidden_layers=layers, no_rope_layer_interval=interval)
    assert positions(spec) == [bool((i + 1) % interval) for i in range(layers)]
    listed = [int(turns) for turns in positions(spec)]
    assert spec_of("smollm3", num_hidden_layers=layers, no_rope_layers=listed) == spec
    assert read_config(write_config("smollm3", spec, {}, None), "x").spec == spec


def test_smollm3_windows_are_those_of_layers_without_positions() -> None:
    spec = spec_of("smollm3", no_rope_layers=[1, 0, 1], use_sliding_window=True, sliding_window=8)
    assert (positions(spec), windows(spec)) == ([True, False, True], [None, 8, None])


def test_a_head_is_128_wide_in_qwen3() -> None:
    left = {key: value for key, value in SMALL.items() if key != "head_dim"}
    widths = {name: attentions(read_config(left | {"model_type": name}, "x").spec)[0].d_head for name in AKIN}
    assert widths == {name: 128 if name == "qwen3" else 16 for name in AKIN}


def test_ties_unless_said() -> None:
    tied = {name for name in AKIN if isinstance(spec_of(name).head, TiedHead)}
    assert tied == {"smollm3", "starcoder2", "cohere"}


def test_cohere_turns_adjacent_pairs_and_scales_its_logits() -> None:
    spec = spec_of("cohere")
    rotaries = [part for _, part in walk(spec) if isinstance(part, Rotary)]
    assert {(rotary.pairing, rotary.theta) for rotary in rotaries} == {("adjacent", 500000.0)}
    assert isinstance(spec.head, Head | TiedHead)
    assert spec.head.scale == 0.0625


@given(divisor=st.decimals("0.001", "1000", places=3).map(float))
def test_granite_divides_its_logits_and_says_so_again(divisor: float) -> None:
    spec = spec_of("granite", logits_scaling=divisor)
    assert isinstance(spec.head, Head | TiedHead)
    assert spec.head.scale == 1 / divisor
    assert write_config("granite", spec, {}, None)["logits_scaling"] == divisor


def test_granite_scores_are_multiplied_as_said() -> None:
    scales = {value: attentions(spec_of("granite", attention_multiplier=value))[0].scale for value in (0.25, 0.3)}
    assert scales == {0.25: None, 0.3: 0.3}  # heads of 16: a quarter is the usual
    assert attentions(spec_of("granite"))[0].scale == 1.0


BAD: list[tuple[str, str, object]] = [
    *((name, "head_dim", value) for name in AKIN for value in (15, 0, "16")),
    *((name, "num_key_value_heads", 3) for name in AKIN),
    *((name, "some_new_key", True) for name in AKIN),
    *((name, "quantization_config", {}) for name in AKIN),
    *((name, "architectures", ["LlamaForCausalLM"]) for name in AKIN),
    *((name, "sliding_window", value) for name in (*WINDOWED, "mistral", "starcoder2") for value in (0, -1, 8.0, True)),
    *((name, "use_sliding_window", None) for name in WINDOWED),
    *(
        (name, "layer_types", value)
        for name in WINDOWED
        for value in ([FULL], [FULL] * 4, [FULL, FULL, "chunked"], [FULL, FULL, SLIDING], "full", [FULL, FULL, []])
    ),
    *((name, "max_window_layers", value) for name in ("qwen2", "qwen3") for value in (-1, None, 1.0)),
    ("qwen2", "attention_bias", False),
    ("qwen3", "head_dim", None),
    ("mistral", "attention_bias", True),
    ("mistral", "layer_types", [SLIDING, FULL, SLIDING]),
    *(("smollm3", "no_rope_layers", value) for value in ([1, 0], [1, 0, 2], [True, False, True], "101")),
    *(("smollm3", "no_rope_layer_interval", value) for value in (0, None)),
    ("olmo", "clip_qkv", 8.0),
    ("starcoder2", "mlp_type", "gated"),
    ("starcoder2", "norm_type", "rms_norm"),
    ("starcoder2", "use_bias", 1),
    ("cohere", "use_qk_norm", 1),
    *(("cohere", "logit_scale", value) for value in (None, 0, -0.0625, "0.0625")),
    *(
        ("granite", f"{name}_multiplier", value)
        for name in ("embedding", "attention", "residual")
        for value in (None, 0, -1.0, True)
    ),
    *(("granite", "logits_scaling", value) for value in (None, 0, -8.0, 1e-320)),
]


@pytest.mark.parametrize(("family", "key", "value"), BAD)
def test_bad_values_are_one_message_naming_the_key(family: str, key: str, value: object) -> None:
    with pytest.raises(InputError) as caught:
        spec_of(family, **{key: value})
    assert key in str(caught.value)
    assert str(caught.value).startswith("x: ")


OWN: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "qwen2": {"use_sliding_window": st.booleans(), "max_window_layers": st.integers(0, 5)},
    "mistral": {"sliding_window": st.none() | st.integers(1, 9)},
    "smollm3": {
        "no_rope_layer_interval": st.integers(1, 5),
        "use_sliding_window": st.booleans(),
        "attention_bias": st.booleans(),
        "mlp_bias": st.booleans(),
        "sliding_window": st.none() | st.just(7),
    },
    "olmo2": {"attention_bias": st.booleans()},
    "olmo": {"attention_bias": st.booleans(), "clip_qkv": st.none()},
    "starcoder2": {"use_bias": st.booleans(), "sliding_window": st.none() | st.integers(1, 9)},
    "cohere": {"attention_bias": st.booleans(), "logit_scale": st.floats(1e-3, 8.0), "use_qk_norm": st.booleans()},
    "granite": {
        "attention_bias": st.booleans(),
        "mlp_bias": st.booleans(),
        "embedding_multiplier": st.integers(1, 20),
        "attention_multiplier": st.floats(1e-3, 2.0),
        "residual_multiplier": st.floats(1e-3, 2.0),
        "logits_scaling": st.integers(1, 20) | st.floats(0.1, 50),
    },
}
OWN["qwen3"] = OWN["qwen2"] | OWN["olmo2"] | {"sliding_window": st.integers(1, 9)}
EPS = {"olmo": "rms_norm_eps", "starcoder2": "norm_epsilon", "cohere": "layer_norm_eps"}


@st.composite
def configs(draw: st.DrawFn, family: str) -> dict[str, Any]:
    """A llama config with this family's keys instead of llama's own."""
    config = draw(llama_configs())
    for key in ("attention_bias", "mlp_bias"):
        del config[key]
    eps = config.pop("rms_norm_eps")
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])  # qwen3's would be 128
    own = draw(st.fixed_dictionaries({}, optional=OWN[family]))
    return config | own | {"model_type": family, EPS.get(family, "rms_norm_eps"): eps}


@pytest.mark.parametrize("family", AKIN)
@given(data=st.data())
def test_what_is_written_reads_back_equal(family: str, data: st.DataObject) -> None:
    first = read_config(data.draw(configs(family)), "x")
    written = write_config(family, first.spec, first.carried, first.dtype)
    again = read_config(json.loads(json.dumps(written)), "x")
    assert (again.spec, again.dtype, again.family) == (first.spec, first.dtype, family)
    assert {key: again.carried.get(key) for key in first.carried} == first.carried
    assert family in families_that_write(first.spec)
    tensor_table(family, first.spec)  # covers every weight, or raises


def test_gguf_files_are_refused_by_name() -> None:
    with pytest.raises(InputError, match="mistral"):
        gguf_table("mistral", spec_of("mistral"))


@pytest.mark.parametrize("family", AKIN)
def test_another_familys_spec_is_refused(family: str) -> None:
    with pytest.raises(InputError):
        write_config(family, read_config({"model_type": "gpt2"}, "x").spec, {}, None)
