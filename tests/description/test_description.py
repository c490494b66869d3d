"""`asbuilt.describe`: the object that the command prints, whatever names the model, and what it says of itself."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import strategies
import torch
from click.testing import CliRunner
from hypothesis import given

import asbuilt
from asbuilt import cost
from asbuilt.checkpoint.source import open_model
from asbuilt.cli.main import cli
from asbuilt.description import Description
from asbuilt.spec import Model, Pass, dumps, walk

# families that differ in what is printed: plain, latent attention, windows, an encoder, no cache
CATALOGUED = ("smollm2-135m", "deepseek-v2", "gemma-2-2b", "t5-small", "vit-base-patch16-224")


def commanded(*words: str) -> str:
    result = CliRunner().invoke(cli, ["describe", *words])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("name", CATALOGUED)
def test_the_command_prints_the_object(name: str) -> None:
    """Document and tables, to the letter, whichever way the model is given."""
    made = asbuilt.describe(name)
    assert json.loads(commanded(name, "--json")) == json.loads(json.dumps(made.document()))
    assert f"{made}\n" == commanded(name)
    assert json.dumps(asbuilt.describe(open_model(name)).document()) == json.dumps(made.document())


@given(spec=strategies.specs())
def test_of_a_spec_and_of_the_model_built_from_it(spec: Model) -> None:
    """Figures are the folds', and those of the spec written as JSON; a model built from it is described by its spec."""
    made = asbuilt.describe(spec, seq=5, batch=2)
    run = Pass(tokens=5, batch=2)
    assert (
        made.parameters["total"] == cost.total_parameters(spec) == sum(row.parameters * row.count for row in made.rows)
    )
    assert made.flops["training_per_token"] == cost.exact(cost.flops(spec, run).training) / run.rows
    assert made.cache["bytes_at_seq_batch"] == 2 * cost.cache(spec, 5, "bf16").at_seq
    assert made.weight_bytes["fp32"] == 4 * made.parameters["total"]
    built = asbuilt.build(spec, device="meta")
    assert asbuilt.describe(built, seq=5, batch=2).document() == made.document()


def test_of_a_spec_file(tmp_path: Path) -> None:
    spec = asbuilt.decoder(d_model=32, n_layers=2, n_heads=4, n_vocab=50, name="own")
    (tmp_path / "own.json").write_text(dumps(spec), encoding="utf-8")
    assert asbuilt.describe(tmp_path / "own.json").document() == asbuilt.describe(spec).document()


@given(spec=strategies.specs())
def test_rows_are_found_by_the_path_of_any_part(spec: Model) -> None:
    """Each part that has a row is found by its own path, and by the folded one; maps of another kind have their own."""
    made, borrowed = asbuilt.describe(spec, seq=5), spec.holders
    for path, part in walk(spec):
        held = {} if path in borrowed else getattr(part, "local_weights", part.holds)()  # those of its maps too
        apart = {name for name, one in getattr(part, "maps", {}).items() if one.kind != part.kind}
        sizes = Counter({path: 0} if part.remembers() else {})
        for name, weight in held.items():
            first = name.partition(".")[0]
            sizes[f"{path}.{first}" if first in apart else path] += weight.size
        for found, size in sizes.items():
            if type(part).__name__ not in ("Linear", "Lora"):
                row = made.at(found)
                if found == path:
                    assert (row.part, row.kind) == (type(part).__name__, part.kind)
                assert row.parameters == size
                assert made.at(row.path) == row


def test_a_path_without_a_row_is_told_what_is_near() -> None:
    made = asbuilt.describe("smollm2-135m")
    with pytest.raises(asbuilt.InputError, match=r"no row has this path.*'blocks.0-29.attention.body'"):
        made.at("blocks.30.attention.body")
    with pytest.raises(asbuilt.InputError, match=r"no row of its own.*blocks\.0-29\.attention\.body"):
        made.at("blocks.3.attention.body.q")


@pytest.mark.parametrize("dtype", ["bf16", "bfloat16", "BF16", "torch.bfloat16", torch.bfloat16])
def test_dtypes_are_spelled_as_anyone_spells_them(dtype: Any) -> None:  # noqa: ANN401
    spec = asbuilt.decoder(d_model=32, n_layers=1, n_heads=4, n_vocab=50)
    assert asbuilt.describe(spec, dtype=dtype, kv_dtype=dtype).document() == asbuilt.describe(spec).document()


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"seq": 0}, "seq"),
        ({"seq": True}, "seq"),
        ({"batch": 1.5}, "batch"),
        ({"images": -1}, "images"),
        ({"dtype": "bf61"}, "dtype"),
        ({"kv_dtype": "f"}, "kv-dtype"),
    ],
)
def test_what_is_asked_is_checked(more: dict[str, Any], field: str) -> None:
    with pytest.raises(asbuilt.InputError, match=f"^{field}: "):
        asbuilt.describe("smollm2-135m", **more).document()


@pytest.mark.parametrize("model", [3, None, object(), asbuilt.decoder(d_model=8, n_layers=1, n_heads=1).at("norm")])
def test_what_is_no_model(model: Any) -> None:  # noqa: ANN401
    with pytest.raises(asbuilt.InputError, match="model: must be a spec"):
        asbuilt.describe(model)


def test_what_is_asked_is_answered() -> None:
    """Of one token too; without a length of 1,024, or of the context where that is less, and of an image all of it."""
    assert asbuilt.describe("smollm2-135m", seq=1).document()["seq"] == 1
    assert asbuilt.describe("smollm2-135m").seq == 1024
    assert asbuilt.describe(asbuilt.decoder(d_model=8, n_layers=1, n_heads=1, max_positions=7)).seq == 7
    assert asbuilt.describe("vit-base-patch16-224", seq=9).seq == 197


def test_it_shows_itself_escaped() -> None:
    """A stranger's name for a model is text in a notebook, and one line in a terminal."""
    spec = asbuilt.decoder(d_model=8, n_layers=1, n_heads=1, n_vocab=5, name="<b>\x1b[2J&")
    made = asbuilt.describe(spec)
    shown = made._repr_html_()
    assert shown.startswith("<p>&lt;b&gt;\\x1b[2J&amp; (llama): ")
    assert "<b>" not in shown
    assert shown.count("<table>") == len(made.tables()) == 9
    assert repr(made).startswith("<Description of <b>\\x1b[2J& (llama): ")
    assert made.markdown().startswith("### Parameters\n")


def test_describing_imports_no_torch() -> None:
    code = (
        "import sys, asbuilt; str(asbuilt.describe('llama-3-8b')); print({'torch', 'click', 'rich'} & {*sys.modules})"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_it_is_worked_out_once() -> None:
    made = asbuilt.describe("smollm2-135m")
    assert isinstance(made, Description)
    assert made.document() is made.document()
    assert made.spec is made.source.spec
