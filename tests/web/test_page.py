"""The page in a headless browser: what it asks for, what it shows, and what its address restores."""

from __future__ import annotations

import json
import random
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from asbuilt.cli.main import cli
from asbuilt.web import questions

pytest.importorskip("uvicorn")
pytest.importorskip("websockets")

import axe
import browser
from browser import Page

if browser.found() is None:
    pytest.skip("no Chromium here", allow_module_level=True)

MODEL, GPU = "smollm2-135m", "l4"
# Text of every element against the colour behind it, by WCAG 2: the lowest ratio, and whose it is.
CONTRAST = """(() => {
  const numbers = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (at) => {
    for (; at; at = at.parentElement) {
      const said = numbers(getComputedStyle(at).backgroundColor);
      if (said.length === 3 || said[3] > 0) return said;
    }
    return [255, 255, 255];
  };
  let worst = [99, ""];
  for (const one of document.querySelectorAll("body *")) {
    const said = [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!said || !one.getClientRects().length) continue;
    const style = getComputedStyle(one), drawn = one instanceof SVGElement;
    const pair = [light(numbers(drawn ? style.fill : style.color)), light(behind(one))].sort((a, b) => b - a);
    const ratio = (pair[0] + 0.05) / (pair[1] + 0.05);
    if (ratio < worst[0]) worst = [ratio, one.outerHTML.slice(0, 100)];
  }
  return worst;
})()"""
NO_JSON = "(one) => !one.querySelector('button[aria-label^=\"JSON of\"]')"
UNNAMED = """[...document.querySelectorAll('input, select, button, svg, section, dialog')]
  .filter((one) => one.getClientRects().length)
  .filter((one) => !(one.labels?.length || one.textContent.trim() && one.tagName === 'BUTTON'
    || one.getAttribute('aria-label') || document.getElementById(one.getAttribute('aria-labelledby'))))
  .map((one) => one.outerHTML.slice(0, 100))"""


def shown(page: Page, figure: str) -> list[str]:
    said = f"[...document.querySelectorAll('[data-figure={json.dumps(figure)}] td.n')].map((one) => one.textContent)"
    return page.run(said)


def test_it_loads_from_this_machine_alone_and_without_a_fault(page: Page, url: str) -> None:
    page.requests.clear()
    page.open(url)
    assert {address for address in page.requests if not address.startswith((url, "about:", "data:"))} == set()
    assert any(address.endswith("api/serve") for address in page.requests)
    assert page.faults == []
    assert page.run("document.querySelector('#model').value") == MODEL


def test_a_change_moves_the_figure_to_that_of_the_command_line(page: Page, url: str) -> None:
    page.open(f"{url}#model={MODEL}&gpu={GPU}")
    whole = page.run("document.querySelectorAll('section').length")
    layers, users = random.randint(31, 60), random.randint(2, 9)
    page.type("#set-num_hidden_layers", str(layers))
    asked = {"model": MODEL, "gpu": GPU, "set": {"num_hidden_layers": layers}}
    before, after = (questions.answer("serve", one) for one in ({"model": MODEL, "gpu": GPU}, asked))
    text = "const {bytes, whole} = await import('./format.js'); return "
    line = {name: next(one["bytes"] for one in made["ladder"] if one["line"] == "weights") for name, made in
            (("before", before), ("after", after))}  # fmt: skip
    written = page.run(f"(async () => {{ {text} [{line['before']}, {line['after']}].map(bytes) }})()")
    assert shown(page, "weights")[:2] == written
    numbers = page.run(f"(async () => {{ {text} [{before['users']}, {after['users']}].map(whole) }})()")
    assert shown(page, "users")[:2] == numbers
    assert len(set(numbers)) == 2
    page.type("#serving-users", str(users))
    page.run("document.querySelectorAll('section button[aria-label^=\"JSON of Memory\"]')[0].click()")
    said = json.loads(page.run("document.querySelector('#json').textContent"))
    wanted = questions.answer("serve", asked | {"options": {"users": users}})
    assert said == json.loads(json.dumps(wanted))
    assert page.run("document.querySelectorAll('section').length") == whole
    assert page.faults == []


def behind(page: Page, panel: str) -> dict[str, Any]:
    """Returns the JSON of a panel, which must be what the command above it prints, but for what was typed there."""
    page.run(f"document.querySelector('section button[aria-label=\"JSON of {panel}\"]').click()")
    said = json.loads(page.run("document.querySelector('#json').textContent"))
    command = shlex.split(page.run("document.querySelector('#command').textContent"))
    page.run("document.querySelector('#close').click()")
    assert said.items() <= json.loads(CliRunner().invoke(cli, command[1:]).stdout).items()
    return said


def test_a_workload_and_its_cost_are_those_of_the_command_line(page: Page, url: str) -> None:
    page.open(f"{url}#model={MODEL}&gpu={GPU}")
    assert page.run("document.querySelector('[data-figure^=workload-]')") is None
    page.type("#serving-input_tokens", str(random.randint(100, 900)))
    assert "output-tokens" in page.run("document.querySelector('#problems').textContent")
    assert page.run("document.querySelector('#serving-output_tokens').getAttribute('aria-invalid')") == "true"
    page.type("#serving-output_tokens", str(random.randint(10, 90)))
    page.type("#serving-rate", f"{random.randint(60, 600)}/min")
    page.type("#serving-price", "$1.25/h")
    said = behind(page, "Workload")
    served = [said["workload"][level] for level in ("middle", "high", "low")]
    for figure, text, of in (
        ("tokens-s-of-answers", "(n) => f.digits(n, 4)", lambda s: s["output_tokens_per_second"]),
        ("first-token-median", "f.seconds", lambda s: s["first_token"]["median"]),
        ("first-token-th", "f.seconds", lambda s: s["first_token"]["p95"]),
        ("time-per-token-median", "f.seconds", lambda s: s["per_token"]["median"]),
        ("time-per-token-th", "f.seconds", lambda s: s["per_token"]["p95"]),
    ):
        wanted = (
            f"(async () => {{ const f = await import('./format.js'); return {[of(s) for s in served]}.map({text}) }})()"
        )
        assert shown(page, f"workload-{figure}") == page.run(wanted)
    costs = [said["cost"][level]["million_output"] for level in ("middle", "high", "low")]
    wanted = f"(async () => {{ const f = await import('./format.js'); return {costs}.map(f.money('$')) }})()"
    assert shown(page, "cost-a-million-tokens-of-answers") == page.run(wanted)
    page.type("#set-num_hidden_layers", "60")
    assert len(shown(page, "workload-tokens-s-of-answers")) == 5
    assert shown(page, "workload-first-token-median")[1] == page.run(
        f"(async () => (await import('./format.js')).seconds({served[0]['first_token']['median']}))()"
    )
    assert page.faults == [] or all("400" in fault for fault in page.faults)
    page.faults.clear()


def test_layouts_are_ranked_and_used(page: Page, url: str) -> None:
    page.open(f"{url}#model=llama-3-8b&gpu={GPU}&users=8&train.gpus=16")
    for box in ("serving-search", "training-search"):
        page.check(f"#{box}")
    serving, training = behind(page, "Layouts for serving, ranked"), behind(page, "Layouts for training, ranked")
    rows = "[...document.querySelectorAll('[data-layout]')].map((one) => one.dataset.layout)"
    assert page.run(rows) == [one["options"] for one in serving["layouts"] + training["search"]["layouts"]]
    assert serving["layouts"]
    assert training["search"]["layouts"]
    before = page.run("Number(document.body.dataset.drawn)")
    page.run("document.querySelectorAll('td.use button')[0].click()")
    page.drawn(before)
    first = serving["layouts"][0]
    assert [page.run(f"document.querySelector('#serving-{name}').value") for name in ("gpus", "tp", "pp")] == [
        str(first[name]) for name in ("gpus", "tp", "pp")
    ]
    layout = behind(page, "Memory of one device")["layout"]
    assert {name: layout[name] for name in ("gpus", "tp", "pp")} == {name: first[name] for name in ("gpus", "tp", "pp")}
    page.open(page.run("location.href"))
    assert page.run("document.querySelector('#serving-search').checked") is True
    assert first["options"] in page.run(rows)


def test_nodes_and_network_are_of_both_plans(page: Page, url: str) -> None:
    page.open(f"{url}#model=llama-3-8b&gpu={GPU}&gpus=4&pp=4&train.gpus=4&train.pp=4&node=2")
    slow = behind(page, "Memory of one device")
    assert any("several nodes" in text for text in slow["warnings"])
    assert "several nodes" in page.run("document.querySelector('#panels .problem').textContent")
    page.type("#serving-network", "10Gb/s")
    assert behind(page, "Memory of one device")["conventions"]["network"] == 1.25e9
    assert behind(page, "Training plan")["options"]["network"] == 1.25e9
    assert page.run("document.querySelectorAll('[data-figure^=rank-]').length") == 4


def test_the_address_restores_the_page(page: Page, url: str) -> None:
    page.open(f"{url}#model={MODEL}&gpu={GPU}")
    width = 2 ** random.randint(7, 12)
    page.type("#set-intermediate_size", str(width))
    page.type("#serving-gpu", "h100-sxm")
    page.type("#training-zero", "3")
    page.type("#serving-context", "4k")
    address, drawn = page.run("location.href"), page.run("document.querySelector('#panels').textContent")
    page.open(address)
    assert page.run("document.querySelector('#panels').textContent") == drawn
    ids = ["set-intermediate_size", "serving-gpu", "training-zero", "serving-context"]
    values = page.run(f"{ids}.map((id) => document.getElementById(id).value)")
    assert values == [str(width), "h100-sxm", "3", "4k"]


def test_a_config_that_is_dropped_is_read_and_kept_in_the_address(page: Page, url: str, tmp_path: Path) -> None:
    config = questions.answer("config", {"model": "gpt-oss-20b", "set": {"num_hidden_layers": 6}})["config"]
    (tmp_path / "mine.json").write_text(json.dumps(config))
    page.open(f"{url}#gpu={GPU}")
    root = page.call("DOM.getDocument")["root"]["nodeId"]
    node = page.call("DOM.querySelector", nodeId=root, selector="#file")["nodeId"]
    before = page.run("Number(document.body.dataset.drawn)")
    page.call("DOM.setFileInputFiles", nodeId=node, files=[str(tmp_path / "mine.json")])
    page.drawn(before)
    wanted = questions.answer("describe", {"config": config})["parameters"]["total"]
    total = page.run(f"(async () => (await import('./format.js')).count({wanted}))()")
    assert shown(page, "parameters") == [total]
    page.open(page.run("location.href"))
    assert shown(page, "parameters") == [total]


def test_a_file_that_is_dropped_is_text_whatever_its_name(page: Page, url: str) -> None:
    config = questions.answer("config", {"model": "gpt2"})["config"]
    page.open(f"{url}#model={MODEL}&gpu={GPU}")
    before = page.run("Number(document.body.dataset.drawn)")
    name, text = "<img src=x onerror=window.hit=1>.json", json.dumps(config)
    page.run(f"""(() => {{
      const carried = new DataTransfer();
      carried.items.add(new File([{json.dumps(text)}], {json.dumps(name)}));
      document.body.dispatchEvent(new DragEvent('drop', {{dataTransfer: carried, bubbles: true, cancelable: true}}));
    }})()""")
    page.drawn(before)
    total = questions.answer("describe", {"model": "gpt2"})["parameters"]["total"]
    assert shown(page, "parameters") == [page.run(f"(async () => (await import('./format.js')).count({total}))()")]
    assert page.run("document.querySelector('#model').value") == name.removesuffix(".json")
    assert page.run("window.hit === undefined && document.querySelectorAll('img').length === 0")


def test_every_figure_opens_and_every_panel_has_its_json(page: Page, url: str) -> None:
    asked = "engine=vllm-0.19&input_tokens=500&output_tokens=50&rate=2/s&price=1&train.gpus=4&train.pp=2"
    page.open(f"{url}#model=gpt-oss-20b&gpu=h100-sxm&{asked}")
    rows = "[...document.querySelectorAll('tr[data-figure]')]"
    train = behind(page, "Training plan")
    written = f"(async () => (await import('./format.js')).seconds({train['step']['seconds']}))()"
    assert shown(page, "run-one-step") == [page.run(written)]
    described = behind(page, "Parameters by kind")["parameters"]
    page.run("document.querySelector('[data-figure=kind-ffn] button').click()")
    exact = page.run("document.querySelector('[data-figure=kind-ffn] + tr').textContent")
    assert f"{described['ffn']:,} exactly" in exact
    page.run("document.querySelector('[data-figure=kind-ffn] button').click()")
    assert page.run(f"{rows}.filter((one) => !one.querySelector('button.open')).map((one) => one.textContent)") == []
    figures = page.run(f"{rows}.map((one) => one.dataset.figure)")
    assert len(figures) == len(set(figures)) > 40
    page.run("document.querySelectorAll('button.open').forEach((one) => one.click())")
    empty = "[...document.querySelectorAll('tr.derivation')].filter((one) => !one.textContent.trim() || one.hidden)"
    assert page.run(f"{empty}.length") == 0
    assert page.run("document.querySelectorAll('#panels section').length") == 14
    assert page.run(f"[...document.querySelectorAll('#panels section')].filter({NO_JSON}).length") == 0
    assert (
        page.run("/NaN|undefined|Infinity|\\[object|\\bfalse\\b/.test(document.querySelector('#panels').innerText)")
        is False
    )


def test_what_is_wrong_is_said_at_its_field(page: Page, url: str) -> None:
    page.open(f"{url}#model={MODEL}&gpu={GPU}")
    page.type("#set-num_key_value_heads", "7")
    said = page.run("document.querySelector('#problems').textContent")
    assert "num_key_value_heads" in said
    assert page.run("document.querySelector('#set-num_key_value_heads').getAttribute('aria-invalid')") == "true"
    page.type("#set-num_key_value_heads", "3")
    assert page.run("document.querySelector('#problems').textContent") == ""


def test_a_telephone_needs_no_sideways_scroll(page: Page, url: str) -> None:
    page.size(360, 740)
    page.open(f"{url}#model=gpt-oss-20b&gpu={GPU}&set.num_hidden_layers=30")
    page.run("document.querySelectorAll('button.open').forEach((one) => one.click())")
    assert page.run("document.documentElement.scrollWidth") <= 360
    page.size(1280)


@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_no_serious_fault(page: Page, url: str, dark: bool) -> None:
    page.size(*((360, 740) if dark else (1280, 900)), dark=dark)
    asked = "input_tokens=500&output_tokens=50&rate=2/s&price=1&search=yes&train.gpus=4&train.pp=2&train.search=yes"
    page.open(f"{url}#model={MODEL}&gpu={GPU}&{asked}&set.num_hidden_layers=31")
    page.run("document.querySelectorAll('button.open').forEach((one) => one.click())")
    assert page.run("document.documentElement.scrollWidth") <= (360 if dark else 1280)
    assert axe.serious(page) == []
    page.size(1280)


@pytest.mark.parametrize("dark", [False, True])
def test_text_is_legible_and_controls_have_names(page: Page, url: str, dark: bool) -> None:
    page.size(1280, dark=dark)
    page.open(f"{url}#model={MODEL}&gpu={GPU}&train.gpus=8&set.num_hidden_layers=40")
    page.run("document.querySelectorAll('button.open').forEach((one) => one.click())")
    back = page.run("getComputedStyle(document.body).backgroundColor")
    ratio, where = page.run(CONTRAST)
    assert ratio >= 4.5, where
    assert page.run(UNNAMED) == []
    page.run("document.querySelector('#theme').value = " + json.dumps("light" if dark else "dark"))
    page.run("document.querySelector('#theme').dispatchEvent(new Event('change'))")
    assert page.run("getComputedStyle(document.body).backgroundColor") != back
    assert page.run(CONTRAST)[0] >= 4.5
    page.run("localStorage.clear()")


def test_a_figure_opens_with_the_keyboard(page: Page, url: str) -> None:
    page.size(1280)
    page.open(f"{url}#model={MODEL}&gpu={GPU}")
    page.run("document.querySelector('[data-figure=memory-weights] button').focus()")
    for kind in ("keyDown", "keyUp"):
        page.call("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r")
    opener = "document.querySelector('[data-figure=memory-weights] button')"
    assert page.run(f"{opener}.getAttribute('aria-expanded')") == "true"
    ladder = questions.answer("serve", {"model": MODEL, "gpu": GPU})["ladder"]
    line = next(one for one in ladder if one["line"] == "weights")
    assert line["formula"] in page.run("document.querySelector('[data-figure=memory-weights] + tr').textContent")
