"""What the page asks, against the documents of the command line."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from asbuilt.checkpoint.source import open_model
from asbuilt.cli.main import cli
from asbuilt.cli.plan import plan as commands
from asbuilt.errors import InputError
from asbuilt.families import write_config
from asbuilt.web import options as offered
from asbuilt.web import questions


def printed(*words: str) -> dict[str, Any]:
    return json.loads(CliRunner().invoke(cli, [*words, "--json"]).stdout)


@pytest.mark.parametrize("model", ["smollm2-135m", "gpt-oss-20b", "mistral-7b-v0.1"])
def test_documents_are_those_of_the_command_line(model: str) -> None:
    asked = {"model": model, "gpu": "h100-sxm"}
    users = str(random.randint(1, 9))
    serving = printed("plan", "serve", model, "--gpu", "h100-sxm", "--users", users, "--context", "2k")
    del serving["typed"]  # of the command line alone
    found = questions.answer("serve", asked | {"options": {"users": users, "context": "2k"}})
    assert json.loads(json.dumps(found)) == serving
    assert questions.answer("describe", {"model": model, "options": {"seq": "64"}}) == printed(
        "describe", model, "--seq", "64"
    )
    training = printed("plan", "train", model, "--gpu", "h100-sxm", "--gpus", "8", "--zero", "3")
    del training["typed"]
    assert json.loads(json.dumps(questions.answer("train", asked | {"options": {"gpus": 8, "zero": 3}}))) == training


def words_of(options: dict[str, Any]) -> list[str]:
    """Returns options as they are typed; "yes" and "no" are those of a switch."""
    flags = {"yes": "--", "no": "--no-"}
    return [
        word
        for name, value in options.items()
        for dashed in (name.replace("_", "-"),)
        for word in ([flags[value] + dashed] if value in flags else [f"--{dashed}", str(value)])
    ]


@pytest.mark.parametrize("model", ["smollm2-135m", "gpt-oss-20b"])
@pytest.mark.parametrize("by", ["rate", "users"])
def test_workloads_and_layouts_are_those_of_the_command_line(model: str, by: str) -> None:
    options: dict[str, Any] = {"input_tokens": random.randint(100, 3000), "output_tokens": random.randint(10, 300)}
    options |= {"price": f"${random.random() + 1:.2f}/h", "network": "200Gb/s", "node": 4, "first_token_target": "2s"}
    options |= {"rate": f"{random.randint(60, 300)}/min", "arrivals": "even"} if by == "rate" else {"users": 7}
    options |= {"speculate": 2, "acceptance": 0.5, "prefix_share": 0.25} if model == "gpt-oss-20b" else {}
    words = ("plan", "serve", model, "--gpu", "l40s", *words_of(options))
    asked = {"model": model, "gpu": "l40s", "options": options}
    for kind, more in (("serve", ()), ("layouts", ("--search",))):
        wanted = printed(*words, *more)
        del wanted["typed"]
        assert json.loads(json.dumps(questions.answer(kind, asked))) == wanted
    served = wanted["workload"]["middle"]
    assert served["first_token"]["median"] <= served["first_token"]["p95"]
    assert wanted["layouts"] or not served["sustained"]


@pytest.mark.parametrize(
    ("model", "gpu", "options"),
    [
        (
            "qwen3-30b-a3b",
            "rtx-4090",
            {"n_gpu_layers": random.randint(30, 40), "n_cpu_moe": 45, "cpu": "epyc-9654", "host": "50GB/s"},
        ),
        ("llama-3-8b", "l4", {"n_gpu_layers": 9, "cpu": "memory=64GB,bandwidth=80GB/s,fp32=1T", "engine": "llama.cpp"}),
        ("llama-3-8b", "h100-sxm-3g.40gb", {"lora": random.randint(2, 9), "lora_rank": 8, "lora_targets": "q, v"}),
        ("llama-3-8b", "h100-sxm,bf16=800T", {"kv_host": f"{random.randint(20, 90)}GiB", "context": "4k"}),
        ("llama-3-70b", "l4", {"any_vendor": "yes", "users": 3}),
        ("gpt-oss-20b", "l40s", {"gpus": 8, "tp": 1, "ep": 8, "redundant_experts": 8 * random.randint(1, 4)}),
        (
            "gpt-oss-20b",
            "l40s",
            {
                "utilisation": 0.8,
                "reserve": "1GiB",
                "workspace": "0",
                "page": "no",
                "windows": "full",
                "count": "nearest",
            }
            | {"flops": "2n", "memory": "vendor", "prompt": "1k", "compute_efficiency": 0.5, "targets": "minimum"},
        ),
        (
            "smollm2-135m",
            "l4",
            {"input_tokens": 90, "output_tokens": 9, "users": 4, "seed": random.randint(1, 99), "requests": 200},
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else value,  # options, not what is drawn for them
)
def test_every_option_of_serving_gives_the_document_of_the_command_line(
    model: str, gpu: str, options: dict[str, Any]
) -> None:
    wanted = printed("plan", "serve", model, "--gpu", gpu, *words_of(options))
    del wanted["typed"]
    asked = {"model": model, "gpu": gpu, "options": options}
    assert json.loads(json.dumps(questions.answer("serve", asked))) == wanted
    questions.answer("curves", asked)


@pytest.mark.parametrize(
    "options",
    [
        {"lora": random.randint(2, 9), "targets": "q,v", "qlora": "yes", "offload": "activations", "host": "50GB/s"},
        {"gpus": 16, "zero": 3, "hsdp": 4, "tokens_per_step": 16 * 4096 * random.randint(1, 4), "master": "no"},
        {"gpus": 4, "tp": 4, "sequence_parallel": "no", "divide_vocabulary": "no", "pad_vocabulary": 100, "fp8": "yes"},
        {"gpus": 4, "pp": 4, "accumulate": 8, "interleave": 2, "overlap_tensor": "yes", "loss": "asbuilt"},
        {"gpus": 4, "cp": 4, "gather_context": "yes", "network": "50GB/s", "node": 2},
        {"utilisation": 0.4, "chunked_loss": 4, "gradient_dtype": "fp32", "reserve": 0.1},
        {"kernel_efficiency": 0.5, "effective_time": 0.8},
        {"attention_efficiency": 0.35},
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else value,  # options, not what is drawn for them
)
def test_every_option_of_training_gives_the_document_of_the_command_line(options: dict[str, Any]) -> None:
    wanted = printed("plan", "train", "llama-3-8b", "--gpu", "h100-sxm", *words_of(options))
    del wanted["typed"]
    found = questions.answer("train", {"model": "llama-3-8b", "gpu": "h100-sxm", "options": options})
    assert json.loads(json.dumps(found)) == wanted


def test_lengths_are_those_of_a_file_with_the_same_text(tmp_path: Path) -> None:
    path = tmp_path / "lengths"
    path.write_text("".join(f"{random.randint(9, 900)} {random.randint(2, 90)}\n" for _ in range(20)))
    options = {"lengths": path.read_text(), "users": 3}
    wanted = printed("plan", "serve", "gpt2", "--gpu", "l4", "--lengths", str(path), "--users", "3")
    del wanted["typed"]
    asked = {"model": "gpt2", "gpu": "l4", "options": options}
    assert json.loads(json.dumps(questions.answer("serve", asked))) == wanted
    with pytest.raises(InputError) as refused:
        questions.answer("serve", asked | {"options": options | {"lengths": "9 9\n9 nine"}})
    assert refused.value.field == "lengths: line 2"


# Options of the command line that the page does not ask with; docs/web.md has the reasons.
ASKED_OTHERWISE = {"gpu", "search"}
LEFT_OUT = {
    "efficiency",
    "expert_loads",
    "allow_unread",
    "plot",
    "html",
    "explain",
    "markdown",
    "json",
    "parameters",
    "help",
}


@pytest.mark.parametrize(("command", "known"), [("serve", offered.SERVE), ("train", offered.TRAIN)])
def test_the_page_asks_with_every_option_of_the_command_line(command: str, known: dict[str, Any]) -> None:
    """In one of its spellings, and with no other."""
    asked = set()
    for param in commands.get_command(click.Context(commands), command).params:  # type: ignore[union-attr]
        names = {name.lstrip("-").replace("-", "_") for name in param.opts if name.startswith("--")}
        found = names & set(known)
        assert found or not names or names & (ASKED_OTHERWISE | LEFT_OUT), names
        asked |= found
    assert asked == set(known)


@pytest.mark.parametrize("field", ["gpu", "cpu"])
@pytest.mark.parametrize("name", ["{}", "{},bf16=1T", "name={},memory=1GB,bandwidth=1GB/s,bf16=1T"])
def test_no_machine_is_read_from_a_file(tmp_path: Path, field: str, name: str) -> None:
    path = tmp_path / "secret.toml"
    path.write_text('memory = "1GB"\nbandwidth = "1GB/s"\nbf16 = "1T"\nkey = "secret"\n')
    asked = {"model": "gpt2", "gpu": "l4", "options": {"n_gpu_layers": 2, "cpu": "epyc-9654"}}
    text = name.format(path)
    asked = asked | {"gpu": text} if field == "gpu" else asked | {"options": {"n_gpu_layers": 2, "cpu": text}}
    with pytest.raises(InputError) as refused:
        questions.answer("serve", asked)
    assert refused.value.field == field
    assert "asbuilt machines" in str(refused.value)


def test_ranked_layouts_are_those_of_the_command_line() -> None:
    for options in ({"gpus": 8, "accumulate": 4}, {"gpus": 16, "batch": 2, "accumulate": 8, "node": 4}):
        asked = {"model": "llama-3-8b", "gpu": "h100-sxm", "options": options}
        wanted = printed("plan", "train", "llama-3-8b", "--gpu", "h100-sxm", *words_of(options), "--search")
        del wanted["typed"]  # of the command line alone
        assert json.loads(json.dumps(questions.answer("ranked", asked))) == wanted


def test_plans_of_other_questions_are_other_plans() -> None:
    one, other = ({"model": "gpt2", "gpu": gpu, "options": {"users": n}} for gpu, n in (("l4", 2), ("l4", 3)))
    given = open_model("smollm2-135m")
    first = [questions.answer("serve", asked) for asked in (one, other, one)]
    assert first[0] == first[2] != first[1]
    assert questions.answer("train", {"gpu": "l4"}, given)["model"] == given.name
    assert questions.answer("train", {"gpu": "l4", "model": "gpt2"}, given)["model"] == "gpt2"


def test_speeds_and_costs_are_those_of_the_plan() -> None:
    price, gpus = random.uniform(1, 9), 2
    options = {"gpus": gpus, "tp": 2, "price": f"{price:.2f} EUR", "users": 32}
    asked = {"model": "llama-3-8b", "gpu": "h100-sxm", "options": options}
    found, plan = questions.answer("curves", asked), questions.answer("serve", asked)
    expected = plan["expected"]["middle"]
    assert found["decode"]["tokens_per_second"] == expected["tokens_per_second"]
    assert found["decode"]["million_output"] == plan["cost"]["middle"]["million_output"]
    for slow, middle, fast, least in zip(
        *(found["speeds"][n] for n in ("low", "middle", "high")), plan["sweep"], strict=True
    ):
        assert slow["tokens_per_second"] < middle["tokens_per_second"] < fast["tokens_per_second"]
        assert fast["tokens_per_second"] < least["tokens_per_second"]
        seconds = 10**6 / middle["tokens_per_second"]
        assert middle["million_output"] == pytest.approx(seconds / 3600 * gpus * round(price, 2))
        assert middle["tokens_per_second_per_user"] * middle["batch"] == pytest.approx(middle["tokens_per_second"])
    assert len(found["contexts"]) == len(plan["by_format"][0]["users"])
    at = dict(zip(found["contexts"], plan["by_format"][0]["users"], strict=True))
    assert at[plan["context"]] == plan["users_that_fit"]


@pytest.mark.parametrize(
    "options",
    [
        {"gpus": 8, "zero": 3},
        {"gpus": 8, "pp": 4, "accumulate": 4},
        {"gpus": 16, "pp": 8, "tp": 2, "accumulate": 16, "checkpointing": "full"},
        {"gpus": 4, "pp": 4, "accumulate": 8, "schedule": "1f1b"},
    ],
)
def test_the_fullest_rank_is_the_plans(options: dict[str, Any]) -> None:
    asked = {"model": "llama-3-8b", "gpu": "h100-sxm", "options": options}
    found, plan = questions.answer("ranks", asked), questions.answer("train", asked)
    stages = found["stages"]
    assert [one["stage"] for one in stages] == list(range(1, options.get("pp", 1) + 1))
    assert sum(one["ranks"] for one in stages) == options["gpus"]
    assert max(one["bytes"] for one in stages) == plan["per_device_bytes"]
    for one in stages:
        held = sum(one[name] for name in ("state", "gathered", "activations", "working"))
        assert one["bytes"] == held - one["on_host"]
    if options.get("schedule") == "1f1b":  # stage s of p holds p - s + 1 micro-batches (arXiv 2104.04473)
        assert [one["in_flight"] for one in stages] == [4, 3, 2, 1]


def test_edits_are_those_of_the_config(tmp_path: Path) -> None:
    layers, vocabulary = random.randint(2, 40), random.randint(100, 9999)
    edits = {"num_hidden_layers": layers, "vocab_size": str(vocabulary)}
    source = open_model("smollm2-135m")
    config = write_config("llama", source.spec, {}, source.reading.dtype)
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers, "vocab_size": vocabulary}))
    wanted = printed("describe", str(tmp_path))["parameters"]
    assert questions.answer("describe", {"model": "smollm2-135m", "set": edits})["parameters"] == wanted
    assert questions.answer("describe", {"config": config, "set": edits})["parameters"] == wanted
    sizes = questions.answer("config", {"model": "smollm2-135m", "set": edits})
    assert sizes["config"]["num_hidden_layers"] == layers
    assert {"label": "layers", "key": "num_hidden_layers", "value": 30, "now": layers} in sizes["editable"]


@pytest.mark.parametrize(
    ("model", "label"),
    [
        ("mistral-7b-v0.1", "layers"),
        ("mistral-7b-v0.1", "FFN width"),
        ("mistral-7b-v0.1", "KV heads"),
        ("mistral-7b-v0.1", "window"),
        ("qwen3-30b-a3b", "experts"),
        ("qwen3-30b-a3b", "experts per token"),
        ("gemma-3-4b", "vocabulary"),
        ("gpt2", "layers"),
    ],
)
def test_each_size_moves_the_figures_as_in_a_config(tmp_path: Path, model: str, label: str) -> None:
    offered = {one["label"]: one for one in questions.answer("config", {"model": model})["editable"]}[label]
    value = offered["value"] * 2 if label in ("window", "KV heads") else offered["value"] + random.randint(1, 5)
    asked = {"model": model, "gpu": "h100-sxm", "set": {offered["key"]: str(value)}}
    (tmp_path / "config.json").write_text(json.dumps(questions.answer("config", asked)["config"]))
    wanted = printed("plan", "serve", str(tmp_path), "--gpu", "h100-sxm")
    found, before = questions.answer("serve", asked), questions.answer("serve", asked | {"set": {}})
    same = set(wanted) - {"model", "typed", "defaults"}
    assert {name: json.loads(json.dumps(found[name])) for name in same} == {name: wanted[name] for name in same}
    moved = [name for name in ("weight_bytes", "users", "prefill", "cache_tokens") if found[name] != before[name]]
    assert moved, label


def test_lists_of_layers_follow_their_number() -> None:
    sizes = questions.answer("config", {"model": "gpt-oss-20b", "set": {"num_hidden_layers": 5}})
    assert sizes["config"]["layer_types"] == ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]
    before, after = ({"model": "gpt-oss-20b", "set": {"num_hidden_layers": n}} for n in (24, 5))
    whole, cut = (questions.answer("describe", asked) for asked in (before, after))
    assert cut["parameters"]["ffn"] * 24 == whole["parameters"]["ffn"] * 5


@pytest.mark.parametrize("model", ["llama-4-scout", "glm-5", "zamba2-7b", "rwkv7-0.1b-world", "nemotron-h-56b"])
def test_as_many_layers_of_every_kind_take_as_much(model: str) -> None:
    offered = {one["label"]: one for one in questions.answer("config", {"model": model})["editable"]}["layers"]
    twice = {"model": model, "set": {offered["key"]: 2 * offered["value"]}}
    once, both = (questions.answer("describe", asked) for asked in ({"model": model}, twice))
    of_blocks = [sum(made["parameters"][kind] for kind in ("attention", "ffn", "ssm")) for made in (once, both)]
    assert of_blocks[1] == pytest.approx(2 * of_blocks[0], rel=0.08)  # towers and predictors stay


@pytest.mark.parametrize(
    ("model", "edits", "follow"),
    [
        ("deepseek-v3", {"num_attention_heads": 64}, {"num_key_value_heads": 64}),
        ("kimi-k2.5", {"text_config.num_attention_heads": 32}, {"text_config.num_key_value_heads": 32}),
        ("olmoe-1b-7b", {"hidden_size": 1024}, {"head_dim": 64}),
        ("deepseek-moe-16b", {"hidden_size": 4096, "num_attention_heads": 32}, {"head_dim": 128}),
        ("transformer-base", {"vocab_size": 32000}, {"decoder_vocab_size": 32000}),
        ("llama-3-8b", {"num_attention_heads": 16}, {"num_key_value_heads": 8, "head_dim": 128}),  # which need not
        ("llama-3-8b", {"hidden_size": 8192}, {"num_key_value_heads": 8, "head_dim": 128}),
    ],
)
def test_sizes_that_must_be_what_others_say_follow_them(
    model: str, edits: dict[str, int], follow: dict[str, int]
) -> None:
    asked = {"model": model, "set": edits}
    answer = questions.answer("config", asked)
    for path, value in (edits | follow).items():
        outer, _, key = path.rpartition(".")
        said = answer["config"][outer] if outer else answer["config"]
        assert said.get(key, value) == value  # what a family need not say is what it takes
    now = {one["key"]: (one["value"], one["now"]) for one in answer["editable"]}
    for path, value in (edits | {path: value for path, value in follow.items() if path in now}).items():
        assert now[path][1] == value
    assert (
        questions.answer("describe", asked)["parameters"]
        != questions.answer("describe", {"model": model})["parameters"]
    )


def test_a_size_that_is_typed_does_not_follow() -> None:
    asked = {"model": "deepseek-v3", "set": {"num_attention_heads": 64, "num_key_value_heads": 32}}
    with pytest.raises(InputError) as refused:
        questions.answer("describe", asked)
    assert "num_key_value_heads" in refused.value.field


def test_the_curve_of_users_holds_the_plans_answer() -> None:
    for context in (3000, 8192):
        asked = {"model": "mistral-7b-v0.1", "gpu": "l4", "options": {"context": context}}
        plan, found = questions.answer("serve", asked), questions.answer("curves", asked)
        at = {point["context"]: point["users"] for point in found["users"]}
        assert at[context] == plan["users"]
        assert sorted(at.values(), reverse=True) == list(at.values())


def test_points_lie_on_or_below_the_roof() -> None:
    roof = questions.answer("curves", {"model": "llama-3-8b", "gpu": "h100-sxm"})["roofline"]
    assert roof["ridge"] == roof["rate"] / roof["bandwidth"]
    prefill, decode = roof["points"]
    assert (prefill["bound"], decode["bound"]) == ("compute", "memory")
    for point in roof["points"]:
        assert point["intensity"] == pytest.approx(point["flops"] / point["moved"])
        assert point["flops_per_second"] <= 1.000001 * min(roof["rate"], point["intensity"] * roof["bandwidth"])
    # 8 billion weights of 2 bytes, read once for 2,048 tokens of 2 FLOPs per weight
    assert 0.5 * 2048 < prefill["intensity"] < 2048 * 1.3


@pytest.mark.parametrize(
    ("kind", "asked", "field"),
    [
        ("serve", {"model": "llama-3-8b", "gpu": "nothing"}, "gpu"),
        ("serve", {"model": "llama-3-8b", "gpu": "machine.toml"}, "gpu"),
        ("serve", {"model": "llama-3-8b", "gpu": "this"}, "gpu"),
        ("serve", {"model": "llama-3-8b"}, "gpu"),
        ("serve", {"model": "llama-3-8b", "gpu": "l4", "options": {"tp": "x"}}, "tp"),
        ("serve", {"model": "llama-3-8b", "gpu": "l4", "options": {"latency_target": "20"}}, "latency_target"),
        ("serve", {"model": "llama-3-8b", "gpu": "l4", "options": {"speed": 1}}, "speed"),
        ("serve", {"model": "llama-3-8b", "gpu": "l4", "options": {"lengths": "/etc/passwd"}}, "lengths"),
        ("serve", {"model": "llama-3-8b", "gpu": "l4", "options": {"input_tokens": "2k"}}, "output-tokens"),
        ("serve", {"model": "llama-3-8b", "gpu": "l4", "options": {"rate": "5/s"}}, "rate"),
        ("serve", {"model": "llama-3-8b", "gpu": "l4", "options": {"lora": 2}}, "lora-rank"),
        ("serve", {"model": "llama-3-8b", "gpu": "l4", "options": {"n_gpu_layers": 2}}, "cpu"),
        ("serve", {"model": "llama-3-8b", "gpu": "h100-sxm-3g.40gb", "options": {"tp": 2}}, "tp"),
        ("serve", {"model": "llama-3-8b", "gpu": "h100-sxm-3g.41gb"}, "gpu"),
        ("serve", {"model": "llama-3-8b", "gpu": "l4", "options": {"any_vendor": True}}, "any_vendor"),
        ("train", {"model": "llama-3-8b", "gpu": "l4", "options": {"tokens_per_step": 5000}}, "tokens_per_step"),
        (
            "serve",
            {"model": "gpt2", "gpu": "l4", "options": {"input_tokens": 9, "output_tokens": 9, "rate": "5"}},
            "rate",
        ),
        ("serve", {"model": "gpt2", "gpu": "l4", "options": {"input_tokens": 9, "output_tokens": 9}}, "users"),
        ("layouts", {"model": "gpt2", "gpu": "l4", "options": {"price": "cheap"}}, "price"),
        ("serve", {"model": "gpt2", "gpu": "l4", "options": {"network": "400"}}, "network"),
        ("train", {"model": "gpt2", "gpu": "l4", "options": {"network": "400G"}}, "network"),
        ("ranked", {"model": "gpt2", "gpu": "l4", "options": {"schedule": "soon"}}, "schedule"),
        ("train", {"model": "llama-3-8b", "gpu": "l4", "options": {"zero": 9}}, "zero"),
        ("describe", {"model": "/etc/passwd"}, "model"),
        ("describe", {"model": 3}, "model"),
        ("describe", {"model": "llama-3-8b", "set": {"num_key_value_heads": 3}}, "num_key_value_heads"),
        ("describe", {"model": "llama-3-8b", "set": {"num_hidden_layers": 10**9}}, "num_hidden_layers"),
        ("describe", {"model": "llama-3-8b", "set": {"attention_bias": 1}}, "attention_bias"),
        ("describe", {"config": {"model_type": "llama", "num_hidden_layers": 10**6}}, "num_hidden_layers"),
        ("describe", {"config": {"model_type": "gpt2", "n_layer": 10**400}}, "n_layer"),
        ("describe", {"config": ["llama"]}, "config"),
        ("describe", {"config": {}}, "model_type"),
        ("describe", {"model": "llama-3-8b", "path": "/etc"}, "path"),
        ("describe", [], "question"),
    ],
)
def test_what_is_wrong_is_named(kind: str, asked: object, field: str) -> None:
    with pytest.raises(InputError) as refused:
        questions.answer(kind, asked)
    assert field in refused.value.field


@pytest.mark.parametrize("name", ["gemma-3-4b", "deepseek-v3", "llama-3-70b", "qwen3-30b-a3b", "gpt2"])
def test_models_offer_the_sizes_of_their_configs(name: str) -> None:
    labels = {one["label"] for one in questions.answer("config", {"model": name})["editable"]}
    assert {"layers", "vocabulary"} <= labels
