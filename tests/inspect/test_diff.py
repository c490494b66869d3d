"""Two models part exactly where one of them was changed, and nowhere before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import strategies
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from asbuilt.checkpoint.save import save
from asbuilt.cli.main import cli
from asbuilt.families import read_config
from asbuilt.inspect import activations, diff
from asbuilt.inspect.diff import Difference, relative
from asbuilt.nn.model import Model
from asbuilt.spec import walk

TOLERANCE = 1e-9


@given(strategies.specs(), strategies.SEEDS, st.data())
@settings(max_examples=30)
def test_the_first_path_is_the_changed_one(spec: object, seed: int, data: st.DataObject) -> None:
    first, second = strategies.randomised(spec, seed), strategies.randomised(spec, seed)  # type: ignore[arg-type]
    ids = torch.arange(9)[None] % first.spec.n_vocab
    assert not any(d.beyond(0.0) for d in diff(first, second, ids))
    name = data.draw(st.sampled_from([n for n, _ in second.named_parameters()]))
    with torch.no_grad():
        second.get_parameter(name).mul_(1.7).add_(0.3)
    order = list(activations(first, ids))
    parted = [d.path for d in diff(first, second, ids) if d.beyond(TOLERANCE)]
    # nothing parts where a scale comes before a norm, or where softmax forgets a bias
    owner = name.rpartition(".")[0]
    if parted and owner in order:  # a router gives several tensors, so it has no tap of its own
        # streams are made of one before the blocks, and joined after them
        runs = 0 if name == "streams.into" else order.index(owner)
        assert parted[0].startswith(owner) or order.index(parted[0]) >= runs


@pytest.mark.parametrize(
    ("first", "second", "parted"),
    [
        ([1.0, -torch.inf], [1.0, -torch.inf], False),
        ([1.0, -torch.inf], [1.0, torch.inf], True),
        ([1.0, -torch.inf], [1.0, 2.0], True),
        ([1.0, 2.0], [1.0, -torch.inf], True),
        ([1.0, torch.nan], [1.0, torch.nan], True),
        ([1.0, -torch.inf], [1.5, -torch.inf], True),
    ],
)
def test_equal_infinities_are_equal_and_no_number_never_is(
    first: list[float], second: list[float], parted: bool
) -> None:
    found = Difference(path="", relative=relative(torch.tensor(first), torch.tensor(second)))
    assert found.beyond(0.1) == parted


def test_taps_are_found_at_the_specs_paths_and_leave_nothing_behind() -> None:
    model = tiny(3)
    seen = activations(model, torch.arange(5)[None])
    assert {path for path, part in walk(model.spec) if part.holds()} <= set(seen)
    assert seen[""].shape == (1, 5, 40)
    assert not any(module._forward_hooks for module in model.modules())


def tiny(seed: int) -> Model:
    config = {
        "model_type": "llama",
        "vocab_size": 40,
        "hidden_size": 12,
        "intermediate_size": 20,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
    }
    return strategies.randomised(read_config(config, "tiny").spec, seed, torch.float32)


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    first, second = tiny(1), tiny(1)
    with torch.no_grad():
        second.get_parameter("blocks.1.ffn.body.down.weight").add_(0.5)
    for name, model in (("a", first), ("b", second), ("c", tiny(1))):
        save(model, tmp_path / name, family="llama", carried={})
    return [str(tmp_path / name) for name in "abc"]


def test_the_command_names_the_path_and_its_exit_code_says_so(folders: list[str]) -> None:
    a, b, c = folders
    same = CliRunner().invoke(cli, ["diff", a, c, "--json"])
    assert same.exit_code == 0, same.output
    assert json.loads(same.output)["same"] is True
    other = CliRunner().invoke(cli, ["diff", a, b, "--json"])
    assert other.exit_code == 1
    assert json.loads(other.output)["first"] == "blocks.1.ffn.body.down"
    told = CliRunner().invoke(cli, ["diff", a, b])
    assert "first divergence at blocks.1.ffn.body.down" in told.output


def test_what_has_no_weights_is_refused(folders: list[str]) -> None:
    refused = CliRunner().invoke(cli, ["diff", folders[0], "gpt2"])
    assert refused.exit_code == 2
    assert "no weights" in refused.output


def test_what_was_read_is_said(folders: list[str], tmp_path: Path) -> None:
    said = CliRunner().invoke(cli, ["diff", folders[0], folders[2], "--json"])
    assert "no tokenizer" in json.loads(said.stdout)["read"]
    assert json.loads(said.stdout)["unread"] == []
    refused = CliRunner().invoke(cli, ["diff", folders[0], folders[2], "--text", "as built"])
    assert (refused.exit_code, "tokenizer" in refused.stderr) == (2, True)
    broken = tiny(1)
    with torch.no_grad():
        broken.get_parameter("blocks.0.ffn.body.down.weight").fill_(torch.nan)
    save(broken, tmp_path / "nan", family="llama", carried={})
    parted = CliRunner().invoke(cli, ["diff", folders[0], str(tmp_path / "nan"), "--json"])
    assert parted.exit_code == 1
    assert json.loads(parted.stdout, parse_constant=pytest.fail)["first"] == "blocks.0.ffn.body.down"
    assert CliRunner().invoke(cli, ["diff", *folders[:2], "--tolerance", "nan"]).exit_code == 2
