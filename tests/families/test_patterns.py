"""Which modules a pattern names: against `re` and `fnmatch`, and hostile ones within their time."""

from __future__ import annotations

import random
import re
import time
import warnings
from contextlib import suppress
from fnmatch import fnmatchcase

import pytest

from asbuilt import InputError
from asbuilt.catalog import find
from asbuilt.families.shared.patterns import matched
from asbuilt.packing import block_scales, left_out

MODULES = ("mlp.gate", "mlp.gate_proj", "mlp.experts.3.down_proj", "self_attn.q_proj", "mlp.shared_expert_gate")
NAMES = [f"model.layers.{i}.{name}" for i in range(12) for name in MODULES] + ["lm_head", "model.embed_tokens"]

# as llm-compressor, Kimi, Qwen and GLM have published them, and other turns that such expressions take
PUBLISHED = [
    ".*lm_head",
    ".*mlp.gate$",
    r".*mlp\.gate$",
    ".*self_attn.*",
    "vision_tower.*",
    r"model\.layers\.(1|10)\..*",
    r".*\.[0-9]+\.mlp.*",
    "^(?!.*experts).*",
    r".*mlp\.(gate|up|gate_up|down)_proj.*",
    r"model.layers.\d{2}.*",
    r".*(gate|down)(_proj)?$",
    r".*layers\.\d+\.mlp\.(?=shared).*",
    "(?:model|lm)_?.*?d",
    "[^.]+$",
    r"[a-z_\-]+",
    r".*\.layers\.\d{1,2}\.mlp\.experts\.\d+\.\w+",
    "$",
    "lm_head|.*embed.*",
    r"\D+\d\D*",
]


@pytest.mark.parametrize("expression", PUBLISHED)
def test_published_expressions_mean_what_they_mean_to_python(expression: str) -> None:
    wanted = {name for name in NAMES if re.match(expression, name)}
    assert matched([f"re:{expression}"], NAMES, "ignore") == wanted


def test_any_expression_that_is_understood_means_what_it_means_to_python() -> None:
    rng = random.Random(20_08)
    names = ["ab", "aab", "a.b", "b", "abab.1", "11", "a1.b2", "a"]
    tried = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of sets within sets
        for _ in range(6000):
            expression = "".join(rng.choice("ab.(|)*+?[]^$\\d{1,2}") for _ in range(rng.randint(1, 9)))
            try:
                found, python = matched([f"re:{expression}"], names, "ignore"), re.compile(expression)
            except (InputError, re.error):
                continue
            tried += 1
            assert found == {name for name in names if python.match(name)}, expression
    assert tried > 1000


@pytest.mark.parametrize(
    "pattern", ["model.layers.1*", "*.mlp.gate", "*experts*proj", "model.layers.*.self_attn", "m*"]
)
def test_stars_as_in_file_names_and_what_lies_within(pattern: str) -> None:
    wanted = {name for name in NAMES if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")}
    assert matched([pattern], NAMES, "ignore") == wanted


def test_a_plain_name_is_whole_pieces() -> None:
    assert matched(["gate"], NAMES, "ignore") == {f"model.layers.{i}.mlp.gate" for i in range(12)}
    assert matched(["model.layers.1"], NAMES, "ignore") == {f"model.layers.1.{name}" for name in MODULES}
    assert matched(["layers.1.mlp.gat", "model.layers"], NAMES, "ignore") == {n for n in NAMES if ".layers." in n}
    assert matched(["lm_head.weight"], NAMES, "ignore") == {"lm_head"}
    assert matched(["language_model.lm_head"], ["language_model.lm_head", "lm_head", "lm"], "x") == {
        "language_model.lm_head",
        "lm_head",
    }
    assert matched([], NAMES, "ignore") == set()


HOSTILE = [
    r"(a+)+$",
    r"((a|b)*c)*$",
    r"((.*)*)*x",
    "(a|a)*b" * 20,
    "((a*b*)*c*)*" * 30,
    "(((a{200}){200}){200}){200}",
    "(((({200}){200}){200}){200})".replace("({200})", "((|){200})"),
    "(?!" * 15 + "a" + ")" * 15,
    "(" * 250 + ")" * 250,
    "[" * 400,
    "a{99999999}",
    "a{1,200}" * 60,
    "(?=(?=(?=.*.*.*.*)))*x",
]


@pytest.mark.parametrize("expression", HOSTILE, ids=lambda e: e[:20])
def test_hostile_expressions_take_no_time(expression: str) -> None:
    names = [
        "a" * 200,
        "ab" * 100,
        *(f"model.layers.{i}.mlp.experts.{j}.up_proj" for i in range(30) for j in range(40)),
    ]
    start = time.process_time()
    with suppress(InputError):
        matched([f"re:{expression}"], names, "ignore")
    assert time.process_time() - start < 3


@pytest.mark.parametrize(
    "pattern", [3, None, "", "x" * 501, "ä", "a\nb", ["a"], "re:(a)\\1", "re:(?<=a)b", "re:a{2,1}"]
)
def test_what_is_no_pattern_is_refused(pattern: object) -> None:
    with pytest.raises(InputError, match="ignore"):
        matched([pattern], NAMES, "ignore")


def test_the_scales_that_a_checkpoint_holds_are_of_the_same_modules() -> None:
    """A router's name is a piece of `gate_proj`: it takes no scale from that."""
    spec = find("deepseek-v3").spec()
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    every = block_scales("deepseek_v3", spec, fp8)
    assert block_scales("deepseek_v3", spec, fp8 | {"modules_to_not_convert": ["gate", "lm_head"]}) == every
    # 3 dense layers of 18,432 and the shared expert of each of 58 and of the layer that predicts, 2,048, by 7,168
    gates = 3 * 144 * 56 + 59 * (1 + 256) * 16 * 56
    assert block_scales("deepseek_v3", spec, fp8 | {"modules_to_not_convert": ["gate_proj"]}) == every - gates
    assert block_scales("deepseek_v3", spec, fp8 | {"ignore": ["re:.*gate_proj$"]}) == every - gates
    assert block_scales("deepseek_v3", spec, fp8 | {"quant_method": "gptq"}) == 0
    with pytest.raises(InputError, match=r"quantization_config\.ignore: must be a list"):
        left_out({"ignore": "lm_head"}, NAMES)
