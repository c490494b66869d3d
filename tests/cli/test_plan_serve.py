"""`asbuilt plan serve`: documents, tables, several models and machines, switches, targets, pictures, exit codes."""

from __future__ import annotations

import json
import random
import shlex
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from click.testing import Result

import asbuilt.measure
from asbuilt import cost
from asbuilt.catalog import find, machines
from asbuilt.cli import plan_serve, plan_train
from asbuilt.cli.plan_serve import _spread
from asbuilt.plan import Conventions, serve

Run = Callable[..., Result]


def test_the_document_is_the_plan_s(run: Run) -> None:
    result = run("plan", "serve", "llama-3-8b", "--gpu", "h100-sxm", "--json")
    assert result.exit_code == 0
    made = serve("llama-3-8b", "h100-sxm").document() | {"defaults": {}}
    found = json.loads(result.stdout)
    assert found.pop("typed") == {"MODEL": ["llama-3-8b"], "--gpu": ["h100-sxm"], "--json": True}
    assert found == json.loads(json.dumps(made))
    assert (found["figures"]["bandwidth"], found["version"]) == (3.35e12, metadata.version("asbuilt"))


def test_what_was_typed_is_what_is_echoed(run: Run) -> None:
    """Names and texts of options as they were spelled: aliases, `=`, units, negations, several values, `--`."""
    spelled = random.choice(("8k", "8e3", "8000"))
    words = ("--gpu", "h100-sxm", "NVIDIA L4", f"--context={spelled}", "--batch", " 4", "--no-page", "--price", "$2/h")
    printed = run("plan", "serve", *words, "--", "llama-3-8b").stdout
    assert printed.endswith(f"\nasked: {shlex.join((*words, '--', 'llama-3-8b'))}\n")
    documents = json.loads(run("plan", "serve", "--json", *words, "--", "llama-3-8b").stdout)["plans"]
    asked = {"--gpu": ["h100-sxm", "NVIDIA L4"], "--context": spelled, "--batch": " 4", "--no-page": True}
    more = {"--json": True, "--price": ["$2/h"], "MODEL": ["llama-3-8b"]}
    assert [document["typed"] for document in documents] == [asked | more] * 2
    assert [(document["context"], document["asked"]["users"]) for document in documents] == [(8000, 4)] * 2
    trained = ("plan", "train", "gpt2", "--gpu", "h100-sxm", "--chunked-loss", "--seq", "1K", "--no-master")
    typed = {"MODEL": "gpt2", "--gpu": "h100-sxm", "--chunked-loss": True, "--seq": "1K", "--no-master": True}
    assert json.loads(run(*trained, "--json").stdout)["typed"] == typed | {"--json": True}
    assert json.loads(run(*trained, "--chunked-loss", "4", "--json").stdout)["typed"]["--chunked-loss"] == "4"
    assert run(*trained).stdout.endswith(f"\nasked: {shlex.join(trained[2:])}\n")


def test_it_does_not_fit(run: Run) -> None:
    result = run("plan", "serve", "llama-3-70b", "--gpu", "h100-sxm")
    assert result.exit_code == 1
    assert "What to change, best first" in result.stdout
    assert run("plan", "serve", "llama-3-70b", "--gpu", "h100-sxm", "--gpus", 2).exit_code == 0


@pytest.mark.parametrize(
    "words",
    [
        ("--gpu", "h100-sxm", "h200", "m1"),
        ("--gpu=h100-sxm", "h200", "m1"),
        ("--gpu", "h100-sxm", "--gpu", "h200", "m1"),
        ("--gpu", "h100-sxm", "--gpu", "h200", "--gpu", "m1"),
    ],
)
def test_several_models_and_machines(run: Run, words: tuple[str, ...]) -> None:
    for order in (("llama-3-8b", "gpt2", *words), (*words, "llama-3-8b", "gpt2"), ("llama-3-8b", *words, "gpt2")):
        plans = json.loads(run("plan", "serve", *order, "--json").stdout)["plans"]
        found = [(plan["model"], plan["machine"]) for plan in plans]
        assert found == [(m, g) for m in ("llama-3-8b", "gpt2") for g in ("h100-sxm", "h200", "m1")]
    result = run("plan", "serve", "llama-3-8b", "gpt2", *words)
    assert result.exit_code == 1  # the first model is too large for the last machine
    assert sum(line.split()[:1] in (["llama-3-8b"], ["gpt2"]) for line in result.stdout.splitlines()) >= 6


def test_switches_reach_the_plan(run: Run) -> None:
    words = (
        "--memory",
        "vendor",
        "--memory-utilisation",
        "1",
        "--reserve-size",
        "3GB",
        "--overhead",
        "3GB",
        "--count",
        "nearest",
    )
    document = json.loads(run("plan", "serve", "llama-3-8b", "--gpu", "a100-80gb", *words, "--json").stdout)
    assert document["users"] == 54
    assert (
        document["conventions"]
        == Conventions(memory="vendor", utilisation=1.0, reserve=3e9, overhead=3e9, count="nearest").plain()
    )


def test_degrees_reach_the_plan(run: Run) -> None:
    words = ("--gpus", 16, "--tp", 4, "--pp", 2, "--context", 4096, "--batch", 8, "--dtype", "fp8", "--kv-dtype", "fp8")
    document = json.loads(run("plan", "serve", "llama-3-70b", "--gpu", "h100-sxm", *words, "--json").stdout)
    assert document["layout"] == {"gpus": 16, "tp": 4, "pp": 2, "ep": 1, "redundant_experts": 0, "replicas": 2}
    assert (document["dtype"], document["kv_dtype"], document["context"]) == ("fp8", "fp8", 4096)
    assert document["decode"]["batch"] == 8


def test_targets_decide(run: Run) -> None:
    words = ("plan", "serve", "llama-3-8b", "--gpu", "h100-sxm", "--users", 1, "--latency-target")
    assert run(*words, "20ms").exit_code == 0
    assert run(*words, "1ms").exit_code == 1
    assert run(*words, "20ms", "--first-token-target", "1us").exit_code == 1


def test_lengths_and_links_with_units(run: Run) -> None:
    """128k as engines read it, and a network of 400 Gb/s, which is 50 GB/s however it is spelled."""
    words = ("plan", "serve", "llama-3.1-8b", "--gpu", "NVIDIA H100 80GB HBM3", "--json", "--tp", 16, "--users", 4)
    for length, tokens in (("128k", 128_000), ("128K", 131_072), ("4096", 4096)):
        document = json.loads(run(*words, "--context", length, "--chunk", "1K", "--prompt", "2k").stdout)
        assert (document["machine"], document["context"]) == ("h100-sxm", tokens)
        assert document["prefill"]["prompt"] == 2000
        assert f"prefilling 1,024 tokens at once after {tokens - 1024:,}" in document["ladder"][3]["note"]
    found = [
        json.loads(run(*words, "--network", said).stdout) for said in ("400Gb/s", "400Gbit/s", "400Gbps", "50GB/s")
    ]
    typed = [document.pop("typed").get("--network") for document in found]
    assert typed == ["400Gb/s", "400Gbit/s", "400Gbps", "50GB/s"]
    usual = json.loads(run(*words).stdout)
    assert "--network" not in usual.pop("typed")
    assert found[0] == found[1] == found[2] == found[3] == usual  # which is the default
    assert found[0]["conventions"]["network"] == 50e9
    slower = json.loads(run(*words, "--network", "100Gb/s").stdout)
    assert slower["decode"]["link_seconds"] == pytest.approx(4 * found[0]["decode"]["link_seconds"])
    wider = json.loads(run(*words, "--node", 16).stdout)  # NVLink 4: 450 GB/s
    assert wider["decode"]["link_seconds"] == pytest.approx(found[0]["decode"]["link_seconds"] / 9)


def test_machines_in_a_file_or_in_numbers(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('memory = "80GB"\nbandwidth = "2TB/s"\n[rates]\nbf16 = "312T"\n')
    said = ("memory=80GB,bandwidth=2TB/s,bf16=312T", tmp_path / "mine.toml")
    found = [json.loads(run("plan", "serve", "llama-3-8b", "--gpu", gpu, "--json").stdout) for gpu in said]
    assert found[0]["users"] == found[1]["users"]
    assert found[0]["decode"] == found[1]["decode"]


def test_explain_and_markdown(run: Run) -> None:
    explained = run("plan", "serve", "llama-3-8b", "--gpu", "h100-sxm", "--explain").stdout
    plan = serve("llama-3-8b", "h100-sxm")
    assert plan.explain() in explained
    assert run("plan", "serve", "llama-3-8b", "--gpu", "h100-sxm", "--markdown").stdout == plan.markdown()
    assert "| llama-3-8b |" in run("plan", "serve", "llama-3-8b", "--gpu", "h100-sxm", "l4", "--markdown").stdout


def test_of_a_config_and_a_checkpoint(run: Run, checkpoint: Path) -> None:
    for model in (checkpoint, checkpoint / "config.json"):
        document = json.loads(run("plan", "serve", model, "--gpu", "cpu-2core", "--json").stdout)
        assert document["fits"]
        assert document["model"] == checkpoint.name
        assert document["largest_context"] == 64


# openai/gpt-oss-120b's config.json, as far as it is its sizes and its packing
OSS_120B = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "sliding_window": 128,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}


def test_gpt_oss_120b_fits_one_h100(run: Run, tmp_path: Path) -> None:
    """As it is run; with this library's unfused kernel the scores of one chunk at 131,072 tokens alone are 160 GiB."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(OSS_120B))
    result = run("plan", "serve", file, "--gpu", "h100-sxm", "--json")
    document = json.loads(result.stdout)
    assert (result.exit_code, document["fits"]) == (0, True)
    assert document["weight_bytes"] == 65_248_815_744  # total_size of model.safetensors.index.json
    assert document["largest_context"] == 131072
    assert document["smallest_count"] == 1
    words = ("plan", "serve", file, "--gpu", "h100-sxm", "--context", "128K")
    assert run(*words).exit_code == 0
    unfused = run(*words, "--kernel", "library", "--json")
    assert unfused.exit_code == 1
    ladder = {line["line"]: line["bytes"] for line in json.loads(unfused.stdout)["ladder"]}
    assert ladder["activations"] == pytest.approx(64 * 2048 * 131072 * 10, rel=0.001)


def test_a_context_beyond_is_a_warning(run: Run) -> None:
    result = run("plan", "serve", "llama-3-8b", "--gpu", "h100-sxm", "--context", 9000)
    assert result.exit_code == 0
    assert "exceed the model's context" in result.stdout


WRONG = [
    (("--gpu", "h100"), "h100-sxm"),
    (("--gpu", "h100-sxm", "--tp", 3), "1, 2, 4, 8, 16 or 32"),
    (("--gpu", "h100-sxm", "--context", -1), "context"),
    (("--gpu", "h100-sxm", "--utilisation", 2), "utilisation"),
    (("--gpu", "h100-sxm", "--reserve", "much"), "reserve"),
    (("--gpu", "h100-sxm", "--latency-target", "soon"), "latency-target"),
    (("--gpu", "h100-sxm", "--latency-target", "20"), "20ms or 0.02s"),
    (("--gpu", "h100-sxm", "--first-token-target", "0.5"), "has no unit"),
    (("--gpu", "h100-sxm", "--network", "400G"), "bits or bytes"),
    (("--gpu", "h100-sxm", "--network", "0GB/s"), "network"),
    (("--gpu", "h100-sxm", "--node", 0), "node"),
    (("--gpu", "h100-sxm", "--context", "128kB"), "128k (128,000)"),
    (("--gpu", "h100-sxm", "--workspace", "1Gb"), "a size is in bytes"),
    (("--gpu", "h100-sxm", "--kernel", "flash"), "engine"),
    (("--gpu", "h100-sxm", "--latency-target", "-5ms"), "latency-target"),
    (("--gpu", "h100-sxm", "--dtype", "bf17"), "bf17"),
    (("--gpu", "h100-sxm", "--plot", "x.gif"), ".svg"),
    (("--gpu", "h100-sxm", "--plot", "/nowhere/x.svg"), "folder"),
    (("--gpu", "h100-sxm", "--efficiency", "/nowhere.json"), "efficiency"),
    (("--gpu", "memory=80GB"), "bandwidth"),
    ((), "--gpu"),
]


@pytest.mark.parametrize(("words", "said"), WRONG, ids=str)
def test_wrong_words_are_one_message(run: Run, words: tuple[object, ...], said: str) -> None:
    result = run("plan", "serve", "llama-3-8b", *words)
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert "Traceback" not in result.output


def measured(name: str, decode: float, prefill: float) -> dict[str, object]:
    """What `asbuilt measure --json` prints, as far as it is read."""
    rates = {dtype: {"product_rate": 1e11} for dtype in ("fp32", "bf16")}
    machine = {"processor": "a processor", "threads": 2, "memory_bytes": 8 * 2**30}
    rows = [
        {"figure": "prefill, 512 tokens", "measured": prefill},
        {"figure": "decode after 128 tokens", "measured": decode},
    ]
    return {
        "model": name,
        "dtype": "bf16",
        "rows": rows,
        "machine": {"machine": machine, "read_bandwidth": 1e10, "rates": rates},
    }


def test_efficiency_of_a_measured_run(run: Run, tmp_path: Path) -> None:
    """Half of the floor's speed is half the efficiency."""
    spec, file = find("smollm2-135m").spec(), tmp_path / "measured.json"
    plan = serve(spec, "memory=8GB,bandwidth=10GB/s,bf16=100G", context=129, users=1, prompt=1)
    assert plan.decode is not None
    flops = serve(spec, "memory=8GB,bandwidth=10GB/s,bf16=100G", context=512, prompt=512, chunk=512).prefill.seconds
    file.write_text(json.dumps(measured("smollm2-135m", plan.decode.tokens_per_second / 2, 512 / flops / 4)))
    words = ("plan", "serve", "smollm2-135m", "--gpu", "l4", "--efficiency", file, "--json")
    efficiency = json.loads(run(*words).stdout)["efficiency"]
    assert efficiency == pytest.approx({"bandwidth": 0.5, "compute": 0.25})
    file.write_text(json.dumps(measured("smollm2-135m", plan.decode.tokens_per_second * 2, 512 / flops * 4)))
    assert json.loads(run(*words).stdout)["efficiency"] == {"bandwidth": 1.0, "compute": 1.0}  # beyond a floor is none
    refused = run("plan", "serve", "gpt2", "--gpu", "l4", "--efficiency", file)
    assert (refused.exit_code, "another model" in refused.stderr) == (2, True)
    for wrong in ("[]", "{", '{"model": "smollm2-135m"}', '{"model": "smollm2-135m", "dtype": "bf16", "machine": {}}'):
        file.write_text(wrong)
        assert run(*words).exit_code == 2


def test_this_machine(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """`this` is what was calibrated, whatever that is; nothing is timed here."""
    from asbuilt.measure import machine as ours
    from asbuilt.measure.rates import Calibration, Rates, TimeGrid

    flat = TimeGrid(((1, 2),), (1.0, 1.0))
    known_rates = Rates(
        vector=flat,
        matrix=flat,
        attention=flat,
        attention_read=flat,
        lines={},
        between=flat,
        product_rate=2e11,
        row_rate=1e10,
    )
    rates: dict[str, Rates] = dict.fromkeys(("fp32", "bf16"), known_rates)
    known: dict[str, str | int | float] = {"processor": "a processor", "threads": 2, "memory_bytes": 8 * 2**30}
    found = Calibration(machine=known, read_bandwidth=1.5e10, rates=rates, probes={}, others=None)
    monkeypatch.setattr(ours, "calibrate", lambda **_: found)
    words = ("plan", "serve", "smollm2-135m", "--gpu", "this", "--context", 64, "--batch", 1, "--json")
    document = json.loads(run(*words).stdout)
    assert document["machine"] == "this"
    assert document["ladder"][0]["bytes"] == 8 * 2**30
    moved = cost.weight_bytes(find("smollm2-135m").spec(), "bf16")
    assert document["decode"]["memory_tokens_per_second"] == pytest.approx(1.5e10 / moved, rel=0.01)


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_pictures(run: Run, tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    files = [tmp_path / f"{name}{suffix}" for name in "ab"]
    for file in files:
        result = run("plan", "serve", "llama-3-8b", "llama-3-70b", "--gpu", "h100-sxm", "--plot", file)
        assert result.exit_code == 1, result.output
    drawn = files[0].read_bytes()
    assert drawn == files[1].read_bytes()  # nothing of the time or of chance is in it
    assert drawn.startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")
    if suffix == ".svg":
        for text in ("device memory", "bytes / bandwidth", "FLOPs / rate", "no user fits at any", "users"):
            assert text in drawn.decode()


def test_without_matplotlib(tmp_path: Path) -> None:
    """In a process where it cannot be imported, the message says what to install."""
    (tmp_path / "matplotlib.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'matplotlib'\", name='matplotlib')"
    )
    words = [
        sys.executable,
        "-c",
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nfrom asbuilt.cli.main import main; main()",
        "plan",
        "serve",
        "gpt2",
        "--gpu",
        "t4",
        "--plot",
        str(tmp_path / "x.svg"),
    ]
    ran = subprocess.run(words, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "pip install 'asbuilt[plots]'" in ran.stderr


def test_every_machine_and_a_few_models() -> None:
    for name in ("llama-3-8b", "mixtral-8x7b"):
        spec = find(name).spec()
        for machine in machines.names():
            document = serve(spec, machine).document()
            assert document["fits"] == (document["users"] >= 1)
            json.dumps(document, allow_nan=False)


def test_an_encoder_is_not_asked_whether_it_fits(run: Run) -> None:
    result = run("plan", "serve", "bert-base-uncased", "--gpu", "t4", "--json")
    assert (result.exit_code, json.loads(result.stdout)["fits"]) == (0, None)
    late = run("plan", "serve", "bert-base-uncased", "--gpu", "t4", "--first-token-target", "1us", "--json")
    assert (late.exit_code, json.loads(late.stdout)["targets"]) == (1, {"time to first token": False})
    result = run("plan", "serve", "vit-base-patch16-224", "--gpu", "t4", "--context", 4000)
    assert (result.exit_code, "197" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    ("given", "spread"),
    [
        ("--gpu t4 l4 m", "--gpu t4 --gpu l4 m"),
        ("m --gpu t4 this l4", "m --gpu t4 --gpu this --gpu l4"),
        ("--gpu=t4 l4 m l4", "--gpu=t4 --gpu l4 m l4"),
        ("t4 --gpu t4", "t4 --gpu t4"),
        ("--gpu t4 m --gpu l4 t4 --json", "--gpu t4 m --gpu l4 --gpu t4 --json"),
        ("--gpu nothing t4", "--gpu nothing --gpu t4"),
        ("--gpu t4 --json l4", "--gpu t4 --json l4"),
        ("--gpu --json t4", "--gpu --json --gpu t4"),
        ("--gpu", "--gpu"),
        ("t4", "t4"),
        ("", ""),
    ],
)
def test_machines_after_one_gpu(given: str, spread: str) -> None:
    """What names no machine is a model or an option, and ends the list."""
    assert list(_spread(given.split())) == spread.split()


@pytest.mark.parametrize("size", ["0", "0GB", "0GiB", " 0 "])
def test_nothing_may_be_kept_free(run: Run, size: str) -> None:
    words = [word for name in ("reserve", "overhead", "workspace") for word in (f"--{name}", size)]
    said = json.loads(run("plan", "serve", "gpt2", "--gpu", "t4", *words, "--json").stdout)["conventions"]
    assert [said[name] for name in ("reserve", "overhead", "workspace")] == [0.0] * 3
    sizes = json.loads(run("plan", "serve", "gpt2", "--gpu", "t4", "--reserve", "1GB", "--json").stdout)["conventions"]
    assert sizes["reserve"] == 1e9


def test_several_plans_one_below_the_other(run: Run) -> None:
    """What is compared, then what is to be said of each; of what to change, the best alone."""
    words = ("plan", "serve", "llama-3-70b", "gpt2", "--gpu", "h100-sxm")
    title, *rest = run(*words, "--markdown").stdout.split("\n\n")
    assert title == "### 2 plans; times are theoretical minima"
    table, second, notes = rest
    assert [row.split(" | ")[0] for row in table.splitlines()[2:]] == ["| llama-3-70b", "| gpt2"]
    assert second == "### llama-3-70b in bf16 on h100-sxm, 8,192 tokens, cache in bf16"
    header, line, *change = notes.strip().splitlines()
    assert (header, line, len(change)) == ("| note |  |", "| --- | --- |", 1)
    assert change[0].count("|") == 3
    explained = run(*words, "--explain").stdout.splitlines()
    titles = [i for i, text in enumerate(explained) if " on h100-sxm, " in text and not text.startswith(" ")]
    assert [explained[i].split()[0] for i in titles] == ["llama-3-70b", "gpt2"]
    assert titles[0] == 0
    assert [explained[i + 1] for i in titles] == ["", ""]
    assert explained[titles[1] - 1] == ""
    assert explained[titles[1] - 2] != ""


@pytest.mark.parametrize(("nbytes", "said"), [(1 << 24, "another model"), ((1 << 24) + 1, "too large")])
def test_a_measured_run_is_at_most_16_mib(run: Run, tmp_path: Path, nbytes: int, said: str) -> None:
    file = tmp_path / "measured.json"
    file.write_text(json.dumps(measured("other", 1.0, 1.0)).ljust(nbytes))
    refused = run("plan", "serve", "gpt2", "--gpu", "l4", "--efficiency", file)
    assert (refused.exit_code, said in refused.stderr) == (2, True), refused.stderr
    file.write_text("[" * 100_000)
    refused = run("plan", "serve", "gpt2", "--gpu", "l4", "--efficiency", file)
    assert (refused.exit_code, "efficiency: must be a JSON file" in refused.stderr) == (2, True)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("gpt2", "llama-3-70b", "--gpu", "h100-sxm"), 1),
        (("llama-3-70b", "gpt2", "--gpu", "h100-sxm"), 1),
        (("gpt2", "llama-3-8b", "--gpu", "h100-sxm"), 0),
        (("bert-base-uncased", "gpt2", "--gpu", "t4"), 0),
        (("bert-base-uncased", "llama-3-70b", "--gpu", "t4"), 1),
        (("bert-base-uncased", "--gpu", "t4", "--first-token-target", "10s"), 0),
    ],
    ids=str,
)
def test_every_plan_must_fit(run: Run, words: tuple[str, ...], code: int) -> None:
    assert run("plan", "serve", *words).exit_code == code


def test_a_name_of_a_wrong_size_is_its_option(run: Run) -> None:
    for name, value in (("reserve", "much"), ("network", "fast"), ("latency-target", "soon")):
        refused = run("plan", "serve", "gpt2", "--gpu", "t4", f"--{name}", value)
        assert refused.stderr.startswith(f"Error: {name}: ")


def test_a_calibration_that_is_disturbed_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By both plans in the same words."""
    asked: dict[str, Callable[[str], None]] = {}
    monkeypatch.setattr(asbuilt.measure, "this_machine", lambda **said: asked.update(said))
    for module in (plan_serve, plan_train):
        module._machine("this")
        asked["say"]("timing reads")
        asked["warn"]("busy")
        assert capsys.readouterr().err == "timing reads ...\nwarning: busy\n"
        assert module._machine("t4").name == "t4"


def test_layers_in_host_memory(run: Run) -> None:
    words = ("plan", "serve", "gpt-oss-20b", "--gpu", "rtx-4090", "-ngl", 20, "--n-cpu-moe", 10)
    document = json.loads(
        run(*words, "--cpu", "memory=64GB,bandwidth=80GB/s,bf16=1T", "--host", "32GB/s", "--json").stdout
    )
    found = document["offload"]
    assert (found["blocks_in_host"], found["blocks_with_experts_in_host"]) == (5, 5)  # of 24, and the output
    assert (found["bus_bytes_per_second"], found["processor"]["bandwidth"]) == (32e9, 80e9)
    assert document["typed"]["-ngl"] == "20"
    refused = run(*words)
    assert (refused.exit_code, "cpu" in refused.stderr) == (2, True)
