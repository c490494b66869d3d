"""The page's rarer options in a headless browser: folded, restored by the address, refused at their fields."""

from __future__ import annotations

import json
import random
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from asbuilt.cli.main import cli
from asbuilt.web import options

pytest.importorskip("uvicorn")
pytest.importorskip("websockets")

import axe
import browser
from browser import Page
from test_page import CONTRAST, GPU, MODEL, UNNAMED

if browser.found() is None:
    pytest.skip("no Chromium here", allow_module_level=True)

HOST = "model=qwen3-30b-a3b&gpu=rtx-4090&engine=llama.cpp&n_gpu_layers=30&n_cpu_moe=40&cpu=epyc-9654"
UNFOLD = "document.querySelectorAll('details').forEach((one) => { one.open = true; })"


def behind(page: Page, panel: str) -> dict[str, Any]:
    """Returns the JSON of a panel, which must be what the command above it prints, but for what was typed there."""
    page.run(f"document.querySelector('section button[aria-label=\"JSON of {panel}\"]').click()")
    said = json.loads(page.run("document.querySelector('#json').textContent"))
    command = shlex.split(page.run("document.querySelector('#command').textContent"))
    page.run("document.querySelector('#close').click()")
    wanted = json.loads(CliRunner().invoke(cli, command[1:]).stdout)
    del wanted["typed"]
    assert said == wanted
    return said


def opened(page: Page, control: str) -> bool:
    return page.run(f"document.getElementById({json.dumps(control)}).closest('details').open")


def at_field(page: Page, control: str) -> str:
    """Returns what is said at a control, "" unless it is marked as wrong and points to the message."""
    one = f"document.getElementById({json.dumps(control)})"
    said = page.run(f"{one}.closest('label').querySelector('.wrong')?.textContent ?? ''")
    marked = page.run(f"[{one}.getAttribute('aria-invalid'), {one}.getAttribute('aria-describedby')]")
    assert marked == (["true", "problems"] if said else ["false", None])
    assert said in page.run("document.querySelector('#problems').textContent")
    return said


def test_every_option_has_one_control(page: Page, url: str) -> None:
    page.open(f"{url}#model={MODEL}&gpu={GPU}")
    ids = page.run("[...document.querySelectorAll('#form [id]')].map((one) => one.id)")
    assert len(ids) == len(set(ids))
    for where, known in (("serving", options.SERVE), ("training", options.TRAIN)):
        shared = {"node", "network", "host"} if where == "training" else {"lengths"}
        found = {name.partition("-")[2] for name in ids if name.startswith(f"{where}-")}
        assert found - {"gpu", "search"} == set(known) - shared | (found & {"gpus"})
    assert page.run("document.querySelectorAll('#form details[open]').length") == 0
    kept = page.run("(async () => { const s = await import('./state.js'); return [s.SERVING, s.TRAINING]; })()")
    assert set(kept[0]) == {*options.SERVE, "gpu", "search"}
    assert set(kept[1]) == {*options.TRAIN, "search"} - {"node", "network", "host"}


def test_layers_in_host_memory_are_those_of_the_command_line(page: Page, url: str) -> None:
    page.open(f"{url}#model=llama-3-8b&gpu={GPU}")
    page.type("#serving-n_gpu_layers", str(random.randint(5, 25)))
    assert at_field(page, "serving-cpu").startswith("cpu: is missing")
    page.type("#serving-cpu", "epyc-9654")
    assert at_field(page, "serving-cpu") == ""
    said = behind(page, "Layers in host memory")["offload"]
    written = f"(async () => (await import('./format.js')).bytes({said['weight_bytes']}))()"
    shown = "document.querySelector('[data-figure=host-weights-there] td.n').textContent"
    assert page.run(shown) == page.run(written)
    page.type("#serving-lora", "4")
    page.type("#serving-lora_rank", "8")
    assert "host memory" in at_field(page, "serving-lora")
    assert at_field(page, "training-lora") == ""
    assert opened(page, "serving-lora")


POOLS = "model=llama-3-70b&gpu=h100-sxm&input_tokens=2000&output_tokens=300&rate=3/s&requests=200&price=$2/h"


def shown(page: Page, figure: str, written: str, *value: object) -> None:
    """Holds the figure of a row to a value of the document, written as the page writes such ones."""
    text = page.run(f"document.querySelector('[data-figure={figure}] td.n').textContent")
    assert text == page.run(f"(async () => (await import('./format.js')).{written}(...{json.dumps(value)}))()")


def test_pools_are_those_of_the_command_line(page: Page, url: str) -> None:
    page.open(f"{url}#{POOLS}")
    assert not opened(page, "serving-prefill_gpus")
    page.type("#serving-prefill_gpus", f"{8 * random.randint(1, 3)},tp=4")
    assert "--decode-gpus" in at_field(page, "serving-prefill_gpus")
    page.type("#serving-decode_gpus", "8,tp=3")
    assert "multiple of 3" in at_field(page, "serving-decode_gpus")
    page.type("#serving-decode_gpus", "16,tp=8")
    said = behind(page, "Pools")["disaggregated"]
    assert said["transfer"]["how"] == "after"
    page.type("#serving-kv_transfer", "layerwise")
    plan = behind(page, "Cache from prefill to decode")
    said = plan["disaggregated"]
    for pool in ("prefill", "decode"):
        shown(page, f"pool-{pool}-weights-of-a-device", "bytes", said[pool]["weight_bytes"])
        shown(page, f"pool-{pool}-sequences-that-fit", "whole", said[pool]["sequences_that_fit"])
        shown(page, f"pool-{pool}-memory-cache-budget", "bytes", said[pool]["ladder"][-1]["bytes"])
        most = said["balance"]["middle"][f"{pool}_requests_per_second"]
        shown(page, f"pool-{pool}-requests-s-at-most", "digits", most, 4)
    shown(page, "crossing-cache-sent", "seconds", said["transfer"]["expected"]["middle"])
    shown(page, "crossing-first-token", "seconds", said["first_token"]["expected"]["middle"])
    shown(page, "workload-cache-sent-th", "seconds", plan["workload"]["middle"]["pools"]["transfer"]["p95"])
    assert f" {said['gpus']} × h100-sxm" in page.run("document.querySelector('#question').textContent")
    before = page.run("document.querySelector('#panels').innerText")
    page.open(page.run("location.href"))
    assert page.run("document.querySelector('#panels').innerText") == before
    assert opened(page, "serving-prefill_gpus")
    page.type("#serving-tp", "2")
    assert "two pools" in at_field(page, "serving-tp")
    page.type("#serving-tp", "")
    page.type("#set-num_hidden_layers", "40")  # each figure beside what it was
    assert page.run("document.querySelectorAll('[data-figure=crossing-first-token] td').length") == 3
    assert "NaN" not in page.run("document.querySelector('#panels').innerText")


def test_adapters_and_a_cache_that_waits_are_those_of_the_command_line(page: Page, url: str) -> None:
    page.open(f"{url}#model=llama-3-8b&gpu=h100-sxm")
    page.type("#serving-lora", str(random.randint(2, 9)))
    assert "lora-rank" in at_field(page, "serving-lora_rank")
    page.type("#serving-lora_rank", "16")
    page.type("#serving-kv_host", f"{random.randint(10, 99)}GiB")
    page.check("#serving-any_vendor")
    page.check("#training-master")
    assert behind(page, "Cache in host memory")["lora"]["rank"] == 16
    assert behind(page, "Training plan")["options"]["master"] is False
    page.type("#training-lora", "8")  # 6ND says nothing of adapters
    assert "NaN" not in page.run("document.querySelector('#panels').innerText")
    address = page.run("location.href")
    page.open(f"{url}#model={MODEL}&gpu={GPU}")
    assert not opened(page, "serving-lora")
    page.open(address)
    assert page.run("document.querySelector('#training-master').checked") is True
    assert opened(page, "serving-lora")
    assert opened(page, "training-master")
    folded = "document.querySelector('#serving-lora').closest('details').querySelector('summary').textContent"
    assert page.run(folded) == "LoRA adapters 2 set"


def test_a_slice_and_other_numbers_are_one_machine(page: Page, url: str) -> None:
    page.open(f"{url}#model={MODEL}&gpu=h100-sxm")
    page.type("#machine-slice", "3g.40gb")
    assert behind(page, "Memory of one device")["machine"] == "h100-sxm-3g.40gb"
    page.type("#serving-tp", "3")
    assert "MIG slice" in at_field(page, "serving-tp")
    page.type("#serving-tp", "")
    page.type("#machine-numbers", "bf16=123T")
    behind(page, "Memory of one device")
    assert "gpu=h100-sxm-3g.40gb%2Cbf16%3D123T" in page.run("location.hash")
    page.open(page.run("location.href"))
    values = "['serving-gpu', 'machine-slice', 'machine-numbers'].map((id) => document.getElementById(id).value)"
    assert page.run(values) == ["h100-sxm", "3g.40gb", "bf16=123T"]
    page.type("#serving-gpu", "l4")
    assert page.run(values) == ["l4", "", ""]
    assert page.run("document.querySelector('#machine-slice').disabled") is True
    page.type("#serving-gpu", "")
    assert at_field(page, "serving-gpu").startswith("gpu:")
    page.type("#machine-numbers", "memory=80GB,bandwidth=2TB/s,bf16=312T")
    behind(page, "Memory of one device")
    page.open(page.run("location.href"))
    assert page.run(values) == ["", "", "memory=80GB,bandwidth=2TB/s,bf16=312T"]


@pytest.mark.parametrize("dropped", [True, False])
def test_lengths_of_a_file(
    page: Page, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dropped: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "".join(f"{random.randint(100, 900)} {random.randint(5, 90)}\n" for _ in range(30))
    Path("lengths.txt").write_text(text)
    page.open(f"{url}#model={MODEL}&gpu={GPU}&users=3&seed={random.randint(1, 99)}&requests=200")
    assert "needs a workload" in at_field(page, "serving-requests")
    before = page.run("Number(document.body.dataset.drawn)")
    if dropped:
        page.run(f"""(() => {{
          const carried = new DataTransfer();
          carried.items.add(new File([{json.dumps(text)}], "lengths.txt"));
          document.querySelector('#lengths-drop').dispatchEvent(
            new DragEvent('drop', {{dataTransfer: carried, bubbles: true, cancelable: true}}));
        }})()""")
    else:
        root = page.call("DOM.getDocument")["root"]["nodeId"]
        node = page.call("DOM.querySelector", nodeId=root, selector="#lengths")["nodeId"]
        page.call("DOM.setFileInputFiles", nodeId=node, files=[str(tmp_path / "lengths.txt")])
    page.drawn(before)
    asked = behind(page, "Workload")["workload"]["asked"]
    assert asked["lengths"] == 30
    page.open(page.run("location.href"))
    assert behind(page, "Workload")["workload"]["asked"] == asked
    assert page.run("document.querySelector('#lengths-said').textContent") == "30 lines"
    page.type("#serving-input_tokens", "9")
    assert "--input-tokens" in at_field(page, "lengths")
    page.type("#serving-input_tokens", "")
    before = page.run("Number(document.body.dataset.drawn)")
    page.run("document.querySelector('#lengths-drop-it').click()")
    page.drawn(before)
    assert "lengths" not in page.run("location.hash")
    assert page.run("document.activeElement.id") == "lengths"


def test_a_group_opens_with_the_keyboard(page: Page, url: str) -> None:
    page.size(1280)
    page.open(f"{url}#model={MODEL}&gpu={GPU}")
    page.run("document.querySelector('#serving-lora').closest('details').querySelector('summary').focus()")
    for kind in ("keyDown", "keyUp"):
        page.call("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r")
    assert opened(page, "serving-lora")
    for kind in ("keyDown", "keyUp"):
        page.call("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)
    assert page.run("document.activeElement.id") == "serving-lora"


@pytest.mark.parametrize("dark", [False, True])
def test_open_groups_are_legible_and_fit_a_telephone(page: Page, url: str, dark: bool) -> None:
    page.size(360, 740, dark=dark)
    page.open(f"{url}#{HOST}&tp=2&kv_host=9GiB&lengths=9 9%0A8 8&train.hsdp=3")
    page.run(UNFOLD)
    assert page.run("document.querySelectorAll('.wrong').length") >= 2
    assert page.run("document.documentElement.scrollWidth") <= 360
    ratio, where = page.run(CONTRAST)
    assert ratio >= 4.5, where
    assert page.run(UNNAMED) == []
    try:
        for address in (HOST, f"{POOLS}&prefill_gpus=8,tp=4&decode_gpus=16,tp=8&kv_transfer=layerwise"):
            page.open(f"{url}#{address}")
            page.run(UNFOLD)
            assert page.run("document.documentElement.scrollWidth") <= 360
            ratio, where = page.run(CONTRAST)
            assert ratio >= 4.5, where
            assert page.run(UNNAMED) == []
            assert axe.serious(page) == []
    finally:
        page.size(1280)


def test_pools_whose_answers_are_of_one_token_decode_nothing(page: Page, url: str) -> None:
    page.open(
        f"{url}#model=llama-3-8b&gpu=h100-sxm&prefill_gpus=1&decode_gpus=1&input_tokens=900&output_tokens=1&rate=5/s"
    )
    balance = behind(page, "Pools")["disaggregated"]["balance"]["middle"]
    assert balance["decode_requests_per_second"] is balance["prefill_gpus_per_decode_gpu"] is None
    said = page.run("document.querySelector('[data-figure=pool-decode-requests-s-at-most]').innerText")
    assert "any number" in said


def test_a_layout_that_is_used_has_its_replicas_of_experts(page: Page, url: str) -> None:
    page.open(f"{url}#model=gpt-oss-20b&gpu=l40s&gpus=4&tp=1&ep=4&redundant_experts={4 * random.randint(1, 4)}")
    page.check("#serving-search")
    found = behind(page, "Layouts for serving, ranked")["layouts"]
    assert any(one["redundant_experts"] for one in found)
    at, one = next((at, one) for at, one in enumerate(found) if one["ep"] == 1)  # which has none
    before = page.run("Number(document.body.dataset.drawn)")
    page.run(f"document.querySelectorAll('td.use button')[{at}].click()")
    page.drawn(before)
    layout = behind(page, "Memory of one device")["layout"]
    names = ("gpus", "ep", "redundant_experts")
    assert {name: layout[name] for name in names} == {name: one[name] for name in names}
