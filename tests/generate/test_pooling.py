"""What sentence-transformers' files say, read from folders made here; sums by hand over transformers' states."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner, Result
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor

from asbuilt.cli.main import cli
from asbuilt.errors import InputError
from asbuilt.generate import pooling
from asbuilt.generate.embed import embed
from asbuilt.generate.pooling import MODES, OLDER, Pooling, read_pooling

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "query", ":", "a", "cat", "dog", "Dog", "sat", "on"]
TEXTS = ["a cat sat on a dog", "dog", "a cat"]
ST = "sentence_transformers.models."


def write_tokenizer(folder: Path) -> None:
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.normalizer = normalizers.Sequence([])
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.add_special_tokens(WORDS[:4])
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")


def write(folder: Path, name: str, said: object) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(said))


def modules(*kinds: str) -> list[dict[str, Any]]:
    return [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": kind if "." in kind else ST + kind}
        for i, kind in enumerate(("Transformer", *kinds))
    ]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Callable[[list[int]], Tensor]]:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=12,
    )
    model = BertModel(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    folder = tmp_path_factory.mktemp("bert")
    model.save_pretrained(folder)
    write_tokenizer(folder)

    @torch.inference_mode()
    def states(ids: list[int]) -> Tensor:
        return model(torch.tensor([ids])).last_hidden_state[0]

    return folder, states


@pytest.fixture
def folder(theirs: tuple[Path, Callable[[list[int]], Tensor]], tmp_path: Path) -> Path:
    """A copy, to which a test adds what it is about."""
    for file in theirs[0].iterdir():
        os.link(file, tmp_path / file.name)
    return tmp_path


def ids(text: str) -> list[int]:
    return [2, *(WORDS.index(word) for word in text.replace(":", " :").split()), 3]


# Of the states x_1 ... x_n of a text, a vector; n tokens of it are pooled, from the one at `skip` on.
BY_HAND: dict[str, Callable[[Tensor, int], Tensor]] = {
    "cls": lambda x, skip: x[skip],
    "max": lambda x, skip: torch.stack([max(column) for column in x[skip:].T]),  # type: ignore[arg-type]
    "mean": lambda x, skip: sum(x[skip:]) / len(x[skip:]),  # type: ignore[arg-type,return-value]
    "mean_sqrt_len_tokens": lambda x, skip: sum(x[skip:]) / math.sqrt(len(x[skip:])),  # type: ignore[arg-type,return-value]
    "weightedmean": lambda x, skip: (
        sum((i + 1) * x[i] for i in range(skip, len(x))) / sum(range(skip + 1, len(x) + 1))  # type: ignore[return-value]
    ),
    "lasttoken": lambda x, skip: x[-1],
}


def close(have: Tensor, want: list[Tensor]) -> None:
    torch.testing.assert_close(have, torch.stack(want), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("older", [True, False])
@pytest.mark.parametrize("mode", BY_HAND)
def test_each_pooling(mode: str, older: bool, folder: Path, theirs: tuple[Path, Any]) -> None:
    """Texts of three lengths in one batch; each alone and unpadded by hand."""
    key = next(key for key, name in OLDER.items() if name == mode)
    write(folder, "modules.json", modules("Pooling"))
    write(
        folder,
        "1_Pooling/config.json",
        {key: True, "word_embedding_dimension": 16} if older else {"pooling_mode": mode, "embedding_dimension": 16},
    )
    close(embed(folder, TEXTS), [BY_HAND[mode](theirs[1](ids(text)), 0) for text in TEXTS])


def test_several_lie_side_by_side_in_their_order(folder: Path, theirs: tuple[Path, Any]) -> None:
    write(folder, "modules.json", modules("Pooling"))
    x = theirs[1](ids("dog"))
    for said, order in (
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, ("cls", "mean")),
        ({"pooling_mode": ["lasttoken", "max"]}, ("lasttoken", "max")),
        ({"pooling_mode_cls_token": False}, ("mean",)),
        ({}, ("mean",)),
        ({"pooling_mode": "cls", "pooling_mode_mean_tokens": True}, ("cls",)),
    ):
        write(folder, "1_Pooling/config.json", said)
        close(embed(folder, ["dog"]), [torch.cat([BY_HAND[name](x, 0) for name in order])])


@pytest.mark.parametrize("mode", BY_HAND)
def test_the_default_prompt_and_leaving_it_out(mode: str, folder: Path, theirs: tuple[Path, Any]) -> None:
    write(folder, "modules.json", modules("Pooling"))
    prompts = {"prompts": {"query": "query: ", "doc": "a "}, "default_prompt_name": "query"}
    write(folder, "config_sentence_transformers.json", prompts)
    asked: list[tuple[dict[str, Any], str, int]] = [  # a prompt's tokens are [CLS] and its own
        ({}, "query: ", 3),
        ({"prompt_name": "doc"}, "a ", 2),
        ({"prompt": "on "}, "on ", 2),
        ({"prompt": ""}, "", 0),
    ]
    for include in (True, False):
        write(folder, "1_Pooling/config.json", {"pooling_mode": mode, "include_prompt": include})
        for how, prompt, skip in asked:
            want = [BY_HAND[mode](theirs[1](ids(prompt + text)), 0 if include else skip) for text in TEXTS]
            close(embed(folder, TEXTS, **how), want)
    with pytest.raises(InputError, match=r"prompt-name.*'passage'.*query or doc"):
        embed(folder, TEXTS, prompt_name="passage")


def test_the_prompt_on_the_command_line(folder: Path, theirs: tuple[Path, Any]) -> None:
    write(folder, "config_sentence_transformers.json", {"prompts": {"query": "query: "}, "default_prompt_name": None})

    def run(*more: str) -> Result:
        return CliRunner().invoke(cli, ["embed", str(folder), "dog", "--json", "--vectors", *more])

    for more, prompt in (((), ""), (("--prompt-name", "query"), "query: "), (("--prompt", "a "), "a ")):
        said = json.loads(run(*more).stdout)
        assert said["prompt"] == prompt
        mean = BY_HAND["mean"](theirs[1](ids(prompt + "dog")), 0)
        close(torch.tensor(said["vectors"]), [mean / mean.norm()])
    assert run("--prompt", "a", "--prompt-name", "query").exit_code == 2
    assert run("--prompt-name", "doc").exit_code == 2


def test_small_letters_and_the_longest_text(folder: Path, theirs: tuple[Path, Any]) -> None:
    write(folder, "sentence_bert_config.json", {"do_lower_case": True, "max_seq_length": 5})
    write(folder, "modules.json", modules("Pooling"))
    write(folder, "1_Pooling/config.json", {})
    close(embed(folder, [" Dog "]), [BY_HAND["mean"](theirs[1](ids("dog")), 0)])
    close(embed(folder, ["a cat sat on a dog"]), [BY_HAND["mean"](theirs[1](ids("a cat sat")), 0)])
    write(folder, "sentence_bert_config.json", {"do_lower_case": False, "max_seq_length": None})
    close(embed(folder, ["Dog"]), [BY_HAND["mean"](theirs[1](ids("Dog")), 0)])
    (folder / "tokenizer_config.json").unlink()
    write(folder, "tokenizer_config.json", {"model_max_length": 4})
    close(embed(folder, ["a cat sat on a dog"]), [BY_HAND["mean"](theirs[1](ids("a cat")), 0)])


def test_a_linear_map_behind_the_pooling(folder: Path, theirs: tuple[Path, Any]) -> None:
    write(folder, "modules.json", modules("Pooling", "Dense", "Normalize"))
    write(folder, "1_Pooling/config.json", {"pooling_mode": "cls"})
    said = {"in_features": 16, "out_features": 3, "bias": True}
    write(folder, "2_Dense/config.json", said | {"activation_function": "torch.nn.modules.activation.Tanh"})
    weight, bias = torch.randn(3, 16), torch.randn(3)
    stored = folder / "2_Dense" / "model.safetensors"
    safetensors.torch.save_file({"linear.weight": weight, "linear.bias": bias}, stored)
    x = theirs[1](ids("dog"))[0]
    row = [
        math.tanh(sum(float(w) * float(v) for w, v in zip(weight[i], x, strict=True)) + float(bias[i]))
        for i in range(3)
    ]
    length = math.sqrt(sum(value**2 for value in row))
    close(embed(folder, ["dog"]), [torch.tensor([value / length for value in row])])
    for change, named in (
        ({"in_features": 8}, "in_features is 16"),
        ({"activation_function": "os.system"}, "activation_function"),
        ({"out_features": 4}, "not the weights"),
        ({"bias": False}, "not the weights"),
        ({"module_input_name": "token_embeddings"}, "module_input_name"),
    ):
        write(folder, "2_Dense/config.json", said | change)
        with pytest.raises(InputError, match=named):
            embed(folder, ["dog"])


def test_a_decoder_whose_folder_says_how(tmp_path: Path) -> None:
    """Its last token's state, the norm behind the blocks included."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=12,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    with pytest.raises(InputError, match=r"modules\.json"):
        embed(tmp_path, TEXTS)
    write(tmp_path, "modules.json", modules("Pooling"))
    write(tmp_path, "1_Pooling/config.json", {"pooling_mode_lasttoken": True})
    with torch.inference_mode():
        want = [model.model(torch.tensor([ids(text)])).last_hidden_state[0, -1] for text in TEXTS]
    close(embed(tmp_path, TEXTS), want)


# What is refused.

BAD: dict[str, tuple[str, object, str]] = {
    "another's step": ("modules.json", [*modules("Pooling"), {"type": ST + "LSTM"}], "LSTM"),
    "the folder's own code": ("modules.json", [{"type": "custom_st.Transformer", "path": ""}], "custom_st.*never run"),
    "order": ("modules.json", modules("Pooling")[::-1], "Transformer first"),
    "no list": ("modules.json", {}, "must be a list"),
    "away": ("modules.json", [modules()[0], {"type": ST + "Pooling", "path": "../away"}], "away"),
    "kind": ("modules.json", [[]], "unknown module"),
    "mode": ("1_Pooling/config.json", {"pooling_mode": "median"}, "median"),
    "no mode": ("1_Pooling/config.json", {"pooling_mode": []}, "pooling_mode"),
    "modes": ("1_Pooling/config.json", {"pooling_mode": [["cls"]]}, "pooling_mode"),
    "older mode": ("1_Pooling/config.json", {"pooling_mode_median": True}, "pooling_mode_median"),
    "not a truth": ("1_Pooling/config.json", {"pooling_mode_cls_token": 1}, "true or false"),
    "width": ("1_Pooling/config.json", {"word_embedding_dimension": 17}, "must be 16"),
    "not JSON": ("1_Pooling/config.json", float("inf"), "Infinity"),
    "length": ("sentence_bert_config.json", {"max_seq_length": 0}, "max_seq_length"),
    "length's kind": ("sentence_bert_config.json", {"max_seq_length": "7"}, "max_seq_length"),
    "letters": ("sentence_bert_config.json", {"do_lower_case": "no"}, "do_lower_case"),
    "prompts": ("config_sentence_transformers.json", {"prompts": {"query": None}}, "prompts"),
    "prompt": ("config_sentence_transformers.json", {"default_prompt_name": "query"}, "default_prompt_name"),
    "no room": ("sentence_bert_config.json", {"max_seq_length": 2}, "leave no room"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_one_message(case: str, folder: Path) -> None:
    write(folder, "modules.json", modules("Pooling"))
    write(folder, "1_Pooling/config.json", {})
    name, said, named = BAD[case]
    write(folder, name, said)
    with pytest.raises(InputError, match=named):
        embed(folder, ["dog"])


def test_pipes_in_place_of_files_are_not_waited_for(folder: Path) -> None:
    write(folder, "modules.json", modules("Pooling"))
    (folder / "1_Pooling").mkdir()
    os.mkfifo(folder / "1_Pooling" / "config.json")
    with pytest.raises(InputError, match="a pipe"):
        embed(folder, ["dog"])


def test_nothing_said_is_the_normalised_mean(tmp_path: Path) -> None:
    assert read_pooling(None) == read_pooling(tmp_path) == Pooling(modes=("mean",), steps=("normalise",))
    assert set(BY_HAND) == set(MODES)


def test_more_closing_tokens_than_the_context_holds(folder: Path) -> None:
    path = folder / "tokenizer.json"
    made = Tokenizer.from_file(str(path))
    closing = " ".join(["[SEP]"] * 40)
    made.post_processor = processors.TemplateProcessing(single=f"$A {closing}", special_tokens=[("[SEP]", 3)])
    path.unlink()
    made.save(str(path))
    with pytest.raises(InputError, match=r"no room for the text \(got 40; must be fewer than 12 tokens\)"):
        embed(folder, ["dog"])


def test_ids_beyond_the_table(folder: Path) -> None:
    path = folder / "tokenizer.json"
    made = Tokenizer.from_file(str(path))
    made.add_tokens(["zebra"])
    path.unlink()
    made.save(str(path))
    with pytest.raises(InputError, match=r"sentences\.1: .*\(got 12; must be below 12\)"):
        embed(folder, ["dog", "zebra"])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_vectors_that_are_no_numbers(value: float, folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    tensors["embeddings.word_embeddings.weight"][8] = value
    path.unlink()
    safetensors.torch.save_file(tensors, path)
    assert bool(embed(folder, ["a cat"]).isfinite().all())
    result = CliRunner().invoke(cli, ["embed", str(folder), "a cat", "dog", "--json"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "vectors: not finite" in result.stderr


@pytest.mark.parametrize("name", ["Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid"])
def test_activations_are_the_modules_that_files_name(name: str) -> None:
    x = torch.linspace(-3, 3, 25)
    torch.testing.assert_close(pooling.ACTIVATIONS[name](x), getattr(torch.nn, name)()(x))
