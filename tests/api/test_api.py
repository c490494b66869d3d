"""The public functions: each takes whatever names a model, says what the command says, and shows itself."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch
from click.testing import CliRunner

import asbuilt
from asbuilt.api.generate import MOST
from asbuilt.checkpoint.source import open_model
from asbuilt.cli.main import cli
from asbuilt.errors import InputError
from asbuilt.generate.draft import PromptLookup
from asbuilt.measure import Report, Row
from asbuilt.measure.calibrate import machine
from asbuilt.plan import ServePlan, TrainPlan
from asbuilt.spec import Model

GPU = "h100-sxm"


def commanded(*words: object) -> dict[str, Any]:
    result = CliRunner().invoke(cli, [*map(str, words), "--json"])
    assert result.exit_code in (0, 1), result.output
    return json.loads(result.stdout)


def test_every_public_name_is_there() -> None:
    """And is a function, a class, or a package; three packages are functions too."""
    for name in asbuilt.__all__:
        found = getattr(asbuilt, name)
        assert callable(found) or isinstance(found, ModuleType)
    assert {*asbuilt.__all__} == {*asbuilt.PUBLIC} <= {*dir(asbuilt)}
    for name in ("generate", "measure", "plan", "describe", "diff"):
        assert callable(getattr(asbuilt, name))
    for name in ("generate", "measure", "plan"):
        assert isinstance(getattr(asbuilt, name), ModuleType)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        asbuilt.nothing  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    "code",
    [
        "import asbuilt; print(asbuilt.plan.serve('llama-3-8b', gpu='h100-sxm').fits)",
        "import asbuilt; print(asbuilt.plan('llama-3-8b', gpu='h100-sxm').fits)",
        "from asbuilt import plan; print(plan('llama-3-8b', gpu='h100-sxm').fits)",
        "from asbuilt.plan import serve; import asbuilt; print(asbuilt.plan('llama-3-8b', 'h100-sxm').fits)",
        "import asbuilt.plan; print(asbuilt.plan.serve('llama-3-8b', gpu='h100-sxm').fits)",
    ],
)
def test_plan_is_a_package_and_a_function_and_imports_no_torch(code: str) -> None:
    whole = f"{code}; import sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


@pytest.mark.parametrize("name", ["llama-3-8b", "gpt-oss-20b", "deepseek-v3"])
def test_a_plan_of_serving_is_the_command_s(name: str) -> None:
    """Of what is published packed too, in its own format."""
    made = asbuilt.plan(name, GPU, context=4096, gpus=8)
    assert isinstance(made, ServePlan)
    document = commanded("plan", "serve", name, "--gpu", GPU, "--context", 4096, "--gpus", 8)
    del document["defaults"], document["typed"]  # of the command alone
    assert json.loads(json.dumps(made.document())) == document
    assert "<table>" in made._repr_html_()


def test_a_plan_of_training_is_the_command_s() -> None:
    made = asbuilt.plan("smollm2-135m", GPU, task="train", gpus=8, zero=3)
    assert isinstance(made, TrainPlan)
    document = commanded("plan", "train", "smollm2-135m", "--gpu", GPU, "--gpus", 8, "--zero", 3)
    assert made.per_device_bytes == document["per_device_bytes"]
    assert made.days == document["days"]
    assert "<table>" in made._repr_html_()


@pytest.mark.parametrize("dtype", ["fp16", "float16", "torch.float16", torch.float16])
def test_a_plan_takes_a_spec_a_built_model_a_path_and_any_dtype(spec: Model, checkpoint: Path, dtype: object) -> None:
    wanted = asbuilt.plan(spec, GPU, context=64, dtype="fp16", kv_dtype="fp16").document()
    for model in (spec, asbuilt.build(spec, device="meta"), checkpoint, str(checkpoint), open_model(checkpoint)):
        made = asbuilt.plan(cast(Any, model), GPU, context=64, dtype=dtype, kv_dtype=dtype)
        assert made.document() == wanted


def test_plans_show_themselves_escaped(spec: Model) -> None:
    """A name from a stranger's file is text in a notebook, on one line."""
    named = spec.edit("", name="<b>\x1b[2J&")
    for made in (asbuilt.plan(named, GPU, context=64), asbuilt.plan(named, GPU, task="train")):
        shown = made._repr_html_()
        assert "<b>" not in shown
        assert "\x1b" not in shown
        assert shown.startswith("<table>")


def test_what_a_plan_refuses(spec: Model) -> None:
    with pytest.raises(InputError, match=r"^task: must be serve or train, got 'pay'"):
        asbuilt.plan(spec, GPU, task="pay")  # type: ignore[call-overload]
    with pytest.raises(InputError, match="unknown dtype"):
        asbuilt.plan(spec, GPU, dtype="bf61")
    with pytest.raises(InputError, match="no such model"):
        asbuilt.plan("llama-3-9b", GPU)


def test_text_for_a_text(spec: Model, checkpoint: Path) -> None:
    """A path, a source and a built model write the same, which is what the command writes."""
    said = asbuilt.generate(checkpoint, "A drawing", max_new_tokens=9)
    document = commanded("generate", checkpoint, "A drawing", "--max-new-tokens", 9)
    assert said == document["text"]
    source = open_model(checkpoint)
    assert asbuilt.generate(source, "A drawing", max_new_tokens=9, dtype=torch.float32) == said
    built = asbuilt.load(source)
    for tokenizer in (source.tokenizer(), source, str(checkpoint)):
        assert asbuilt.generate(built, "A drawing", max_new_tokens=9, tokenizer=tokenizer) == said


def test_as_many_tokens_as_the_command_writes() -> None:
    option = next(option for option in cli.get_command(None, "generate").params if option.name == "max_new_tokens")  # type: ignore[union-attr,arg-type]
    assert option.default == MOST


def test_token_ids_for_token_ids(spec: Model, checkpoint: Path) -> None:
    """With a tokenizer or without; a stop text ends only what has one."""
    source = open_model(checkpoint)
    built, ids = asbuilt.load(source), [1, 2, 3, 250]
    with_one = asbuilt.generate(source, ids, max_new_tokens=9)
    assert with_one == asbuilt.generate(built, ids, max_new_tokens=9, tokenizer=source)
    assert all(isinstance(token, int) for token in with_one)
    logits = built(torch.tensor([ids]))[0, -1]
    assert asbuilt.generate(built, ids, max_new_tokens=1) == [int(logits.argmax())] == with_one[:1]
    (checkpoint / "tokenizer.json").unlink()
    assert asbuilt.generate(checkpoint, ids, max_new_tokens=9, dtype="fp32") == with_one


def test_drafts_by_name_model_or_path(spec: Model, checkpoint: Path) -> None:
    """A path, a built model, a word and what drafts; of a path and of a built model."""
    built, ids = asbuilt.load(checkpoint), [1, 2, 3, 250]
    want = asbuilt.generate(built, ids, max_new_tokens=9)
    for model in (built, checkpoint):
        for draft in (checkpoint, str(checkpoint), built, "prompt", PromptLookup(2)):
            assert asbuilt.generate(model, ids, max_new_tokens=9, draft=draft) == want
    assert asbuilt.generate(checkpoint, ids, max_new_tokens=9, draft=built, draft_tokens=2) == want
    (checkpoint / "tokenizer.json").unlink()
    assert asbuilt.generate(checkpoint, ids, max_new_tokens=9, dtype="fp32", draft=checkpoint) == want
    with pytest.raises(InputError, match="draft_tokens: nothing drafts"):
        asbuilt.generate(built, ids, draft_tokens=2)
    with pytest.raises(InputError, match="draft_tokens: the drafter has its own count"):
        asbuilt.generate(built, ids, draft=PromptLookup(2), draft_tokens=2)
    with pytest.raises(InputError, match="draft_tokens: must be a whole number"):
        asbuilt.generate(built, ids, draft=checkpoint, draft_tokens=0)
    with pytest.raises(InputError, match=r"draft: no such model .*must be own, prompt, "):
        asbuilt.generate(built, ids, draft="promt")
    with pytest.raises(InputError, match="draft: must be a model"):
        asbuilt.generate(built, ids, draft=torch.nn.Linear(2, 2))  # type: ignore[call-overload]


def test_what_generate_refuses(spec: Model, checkpoint: Path) -> None:
    built = asbuilt.build(spec)
    with pytest.raises(InputError, match="tokenizer: a built model has no tokenizer"):
        asbuilt.generate(built, "A")
    with pytest.raises(InputError, match="has no weights"):
        asbuilt.generate(spec, "A")
    with pytest.raises(InputError, match="has no weights"):
        asbuilt.generate("llama-3-8b", [1])
    with pytest.raises(InputError, match="model: must be a model"):
        asbuilt.generate(torch.nn.Linear(2, 2), "A")  # type: ignore[call-overload]
    with pytest.raises(InputError, match="must be"):
        asbuilt.generate(checkpoint, "A", dtype="q4_k")
    (checkpoint / "tokenizer.json").unlink()
    with pytest.raises(InputError, match="has no tokenizer"):
        asbuilt.generate(checkpoint, "A")


def test_where_two_models_differ(spec: Model, checkpoint: Path) -> None:
    """A folder and the model loaded from it do not; one matrix disturbed is named, as the command names it."""
    built = asbuilt.load(checkpoint)
    found = asbuilt.diff(checkpoint, built)
    assert found.same
    assert found.document()["first"] is None
    with torch.no_grad():
        built.get_parameter("blocks.1.ffn.body.down.weight").mul_(2)
    found = asbuilt.diff(built, checkpoint, text="A drawing")
    assert not found.same
    assert found.first is not None
    assert found.first.path.startswith("blocks.1.ffn.body.down")
    assert found.note == "read: the text's first 9 tokens of 9"
    assert str(found).startswith("\nfirst divergence at blocks.1.ffn.body.down")
    assert re.match("<table><caption>first divergence at blocks.1", found._repr_html_())
    assert commanded("diff", checkpoint, checkpoint) == asbuilt.diff(checkpoint, checkpoint).document()


def test_models_without_a_tokenizer_read_fixed_ids(spec: Model) -> None:
    one, other = asbuilt.build(spec, seed=1), asbuilt.build(spec, seed=2)
    found = asbuilt.diff(one, other)
    assert found.first is not None
    assert (found.first.path, found.read) == ("embedding", "32 fixed token ids, since there is no tokenizer")
    with pytest.raises(InputError, match="neither model has a tokenizer"):
        asbuilt.diff(one, other, text="A")
    with pytest.raises(InputError, match="SECOND: missing"):
        asbuilt.diff(one)
    with pytest.raises(InputError, match="tolerance: must be a number"):
        asbuilt.diff(one, other, tolerance=float("nan"))


def report(model: str = "m") -> Report:
    row = Row(figure="parameters", unit="<i>", predicted=3, measured=4, tolerance=0.0)
    return Report(model=model, dtype="fp32", machine={"machine": machine()}, rows=(row,), notes=("a <note>",))


@pytest.mark.parametrize("dtype", ["bf16", torch.bfloat16, "bfloat16", None])
def test_which_model_is_measured(spec: Model, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, dtype: object) -> None:
    """A description is built, a folder loaded, a built model taken as it is; the measuring itself is another's test."""
    seen: list[Any] = []
    monkeypatch.setattr("asbuilt.measure.measure", lambda model, **more: seen.append((model, more)) or report())
    wanted = torch.float32 if dtype is None else torch.bfloat16
    for model in (spec, checkpoint, str(checkpoint), asbuilt.build(spec, dtype=wanted)):
        assert asbuilt.measure(cast(Any, model), dtype=dtype).model == "m"
        assert {parameter.dtype for parameter in seen[-1][0].parameters()} == {wanted}
        assert seen[-1][0].spec == spec
    assert [more.get("name") for _, more in seen] == ["tiny", "tiny", "tiny", None]
    assert seen[-1][0] is model


def test_what_measure_refuses(spec: Model) -> None:
    with pytest.raises(InputError, match="dtype: a built model is measured in its own dtype"):
        asbuilt.measure(asbuilt.build(spec), dtype="bf16")
    with pytest.raises(InputError, match="dtype: no calibration"):
        asbuilt.measure(spec, dtype="fp16")
    with pytest.raises(InputError, match="dtype: no calibration"):
        asbuilt.measure(asbuilt.build(spec, dtype="fp16"))
    with pytest.raises(InputError, match="only causal language models"):
        asbuilt.measure(asbuilt.build(spec.edit("", head=None)))
    with pytest.raises(InputError, match="model: must be a model"):
        asbuilt.measure(torch.nn.Linear(2, 2))  # type: ignore[arg-type]


def test_a_report_shows_itself_escaped() -> None:
    made = report("<m>")
    shown = made._repr_html_()
    assert "&lt;m&gt; in fp32 on " in shown
    assert "&lt;i&gt;" in shown
    assert shown.count("<p>") == 2
    assert not re.search("<(m|i|note)>", shown)
    assert str(made).splitlines()[1:3] == ["", "Predicted and measured"]
    assert "MISSED: should be exact" in str(made)
    assert str(made).endswith("note: a <note>")
    assert [row["figure"] for row in made.document()["rows"]] == ["parameters"]
