"""What a recipe's data section names: texts of all kinds under all objectives, trained by one loop and resumed."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from small_runs import killed_at, log, require_equal, state

from asbuilt import InputError, load
from asbuilt.cost.bill import flops
from asbuilt.spec.part import Pass
from asbuilt.text.tokenizer import Tokenizer
from asbuilt.train import loop, own_texts
from asbuilt.train import recipe as recipes
from asbuilt.train.batch import IGNORED
from asbuilt.train.corpus import read_corpus
from asbuilt.train.data import ShardData, pack
from asbuilt.train.recipe import Recipe, loads
from asbuilt.train.settings import Data

GPT = 'model_type = "gpt2"\nn_layer = 1\nn_embd = 16\nn_head = 2\nn_positions = 16\nresid_pdrop = 0.0\n'
BERT = (
    'model_type = "bert"\narchitectures = ["BertForMaskedLM"]\nhidden_size = 16\nnum_hidden_layers = 1\n'
    "num_attention_heads = 2\nintermediate_size = 32\nmax_position_embeddings = 16\n"
)
T5 = 'model_type = "t5"\nd_model = 16\nd_kv = 8\nd_ff = 32\nnum_layers = 1\nnum_heads = 2\n'
MODELS = {"next": GPT, "prefix": GPT, "masked": BERT, "spans": T5, "prefix-encoder": T5, "pairs": T5}


def words(n: int) -> str:
    return " ".join(random.choices(("tree", "river", "blue", "été", "42", "(x)"), k=n))


def texts(folder: Path, objective: str) -> Path:
    """JSON lines of documents, or of pairs."""
    keys = own_texts.PAIR if objective == "pairs" else ("text",)
    lines = [{key: words(random.randint(2, 9)) for key in keys} for _ in range(60)]
    file = folder / "texts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return file


def recipe(folder: Path, objective: str, out: str, *changes: str) -> Recipe:
    file = folder / "texts.jsonl"
    file = file if file.exists() else texts(folder, objective)
    small = ["data.context=12", "data.target=8", "data.batch=2", "data.tokenizer=bytes", "schedule.warmup=1"]
    steps = ["run.steps=6", "run.save_every=2", "run.log_every=1", "run.validate_every=3"]
    own = [f"data.text={file}", f"data.objective={objective}", f"run.out={folder / out}"]
    return loads(f"[model.config]\n{MODELS[objective]}", changes=[*small, *steps, *own, *changes])


@pytest.mark.parametrize("objective", MODELS)
def test_each_objective_trains_and_resumes_bit_by_bit(tmp_path: Path, objective: str) -> None:
    outcome = loop.run(recipe(tmp_path, objective, "whole"))
    made = recipe(tmp_path, objective, "stopped")
    killed_at(made, random.randint(2, 5))
    loop.run(made, resume=True)
    require_equal(state(tmp_path / "whole", 6), state(tmp_path / "stopped", 6))
    assert log(tmp_path / "whole") == log(tmp_path / "stopped")
    assert outcome.validation is not None
    exported = tmp_path / "whole" / "model"
    assert load(exported).spec.n_vocab == Tokenizer.from_file(exported).n_vocab


def test_a_masked_batch_of_documents_hides_tokens_of_the_text(tmp_path: Path) -> None:
    given = recipe(tmp_path, "masked", "run", "data.packing=documents", "data.validation=0").data
    data, vocabulary = read_corpus(given, 3, tmp_path / "run")
    lines = [json.loads(line)["text"] for line in (tmp_path / "texts.jsonl").read_text(encoding="utf-8").splitlines()]
    assert isinstance(data, ShardData)
    assert vocabulary.tokenizer is not None
    whole = vocabulary.tokenizer.decode(data.shards.tokens(0, len(data.shards)).tolist())
    assert whole == "".join(lines)
    ends = np.cumsum([len(line.encode()) + 1 for line in lines])  # a byte each, and the end token
    assert data.shards.ends.tolist() == ends.tolist()
    batch = data.batch(random.randrange(99))
    mask = next(id_ for id_, one in vocabulary.tokenizer.special_tokens.items() if one.content == "<|mask|>")
    hidden = batch.ids == mask
    assert bool((batch.targets[hidden] < 256).all())


def test_a_row_of_a_single_document_holds_no_other(tmp_path: Path) -> None:
    ends = np.cumsum(random.choices(range(1, 20), k=50))
    within = range(random.randrange(5), int(ends[-1]) - random.randrange(5))
    length = random.randint(2, 9)
    rows = pack(ends, within, length, single=True)
    assert [token for start, stop in rows for token in range(start, stop)] == list(within)
    document = np.searchsorted(ends, np.arange(int(ends[-1])), side="right")
    for start, stop in rows:
        assert stop - start <= length
        assert document[start] == document[stop - 1]
    needed = sum(-(-len(list(held)) // length) for held in _runs(document[within.start : within.stop]))
    assert len(rows) == needed


def _runs(numbers: np.ndarray) -> list[list[int]]:
    return [[one for one in numbers.tolist() if one == each] for each in dict.fromkeys(numbers.tolist())]


def test_single_rows_mask_the_rest(tmp_path: Path) -> None:
    given = recipe(tmp_path, "next", "run", "data.packing=single").data
    data, _ = read_corpus(given, 1, tmp_path / "run")
    assert isinstance(data, ShardData)
    for step in random.sample(range(100), 3):
        batch, documents = data.batch(step), data.documents(step)
        assert bool(((documents[:, 1:] == -1) == (batch.targets == IGNORED)).all())


@pytest.mark.parametrize("tokenizer", ["characters", "bytes", "bpe"])
def test_tokenizers_made_for_a_folder_spell_it(tmp_path: Path, tokenizer: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    held = {f"{name}.txt": words(60) for name in "ba"}
    for name, text in held.items():
        (folder / name).write_text(text, encoding="utf-8")
    given = Data(text=str(folder), tokenizer=tokenizer, n_vocab=270, context=8, validation=0.0)
    data, vocabulary = read_corpus(given, 1, tmp_path / "run")
    assert isinstance(data, ShardData)
    assert vocabulary.tokenizer is not None
    ids = data.shards.tokens(0, len(data.shards))
    assert vocabulary.tokenizer.decode(ids.tolist()) == held["a.txt"] + held["b.txt"]
    assert int(vocabulary.byte_lengths()[ids].sum()) == sum(len(text.encode()) for text in held.values())
    if tokenizer == "bpe":
        assert vocabulary.n_vocab == 270
    # the shards themselves, with their tokenizer, are the same data
    made = next((tmp_path / "run" / "tokens").glob("tokenizer-*"))
    again, _ = read_corpus(
        Data(text=str(data.shards.folder), tokenizer=str(made), context=8, validation=0.0), 1, tmp_path
    )
    assert torch.equal(again.batch(7).ids, data.batch(7).ids[:, : given.context])
    with pytest.raises(InputError, match=r"data\.tokenizer: .* holds token ids"):
        read_corpus(Data(text=str(data.shards.folder), context=8), 1, tmp_path)


@pytest.mark.parametrize(
    ("objective", "changes", "said"),
    [
        ("next", ["data.separate=true", "data.objective=masked"], r"data\.separate: must be false"),
        ("spans", ["data.packing=documents"], r"data\.packing: must be stream for the objective spans"),
        ("next", ["data.objective=masked"], r"model: the objective masked does not suit it.*must be an encoder "),
        ("masked", ["data.objective=next"], "must be a decoder"),
        ("masked", ["data.objective=spans"], "must be an encoder-decoder"),
        ("next", ["data.tokenizer=bpe", "data.n_vocab=9000"], r"data\.n_vocab: the text has no more pairs"),
        ("next", ["data.context=9000"], "sequence takes 9,001"),
        ("next", ["data.key=body"], 'a string "body"'),
        ("next", ["data.rate=1.0"], r"data\.rate"),
        ("next", ["data.packing=loose"], r"data\.packing"),
        ("next", ["data.objective=last"], r"data\.objective"),
        ("next", ["data.objective=pairs"], "is no pair"),
    ],
)
def test_what_a_data_section_refuses(tmp_path: Path, objective: str, changes: list[str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        loop.run(recipe(tmp_path, objective, "run", *changes))
    # what was tokenised stays, and is no run: the corrected recipe starts
    left = [path.name for path in (tmp_path / "run").glob("*")]
    assert left in ([], ["tokens"])


def test_a_tokenizer_without_a_needed_token_is_refused(tmp_path: Path) -> None:
    read_corpus(recipe(tmp_path, "next", "one").data, 1, tmp_path / "one")
    made = next((tmp_path / "one" / "tokens").glob("tokenizer-*"))
    with pytest.raises(InputError, match="has no mask_token"):
        loop.run(recipe(tmp_path, "masked", "two", f"data.tokenizer={made}"))


@pytest.mark.parametrize("name", sorted(set(recipes.shipped()) - {"characters", "clip"}))
def test_shipped_recipes_suit_their_data(name: str) -> None:
    given = recipes.read(name)
    assert given.data.text in own_texts.NAMES
    reading = loop.described(given, 258 if given.data.tokenizer == "bytes" else given.data.n_vocab)
    bytes_and_two = 256 + 2  # the end of a document, and padding
    assert reading.spec.n_vocab == (bytes_and_two if given.data.tokenizer == "bytes" else given.data.n_vocab)
    if name == "induction":
        assert [len(block.branches) for block in reading.spec.blocks] == [1, 1]


def test_the_dense_twin_has_the_products_of_two_experts() -> None:
    def products(name: str) -> float:
        given = recipes.read(name)
        spec = loop.described(given, given.data.n_vocab).spec
        run = Pass(batch=1, tokens=given.data.context)
        return flops(spec, run).forward

    width, n_layers, context = 128, 4, 128
    for n_experts in (4, 8):
        router = 2 * n_layers * context * width * n_experts
        assert products(f"moe-{n_experts}") == products("dense") + router


def test_texts_of_python_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = own_texts.files("python:sources", tmp_path)
    assert json.__file__ in names
    assert not any("site-packages" in name or "/test/" in name for name in names)
    sentences = list(own_texts.sentences())
    assert len(sentences) > 1000
    assert all(one[-1] in ".!?" and ">>>" not in one for one in sentences)
    monkeypatch.setattr(own_texts, "modules", lambda: [Path(json.__file__)])  # the whole library takes long
    (file,) = own_texts.files("python:docstrings", tmp_path)
    pairs = [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]
    assert {"source": json.dumps.__doc__.split("\n")[0].strip(), "target": "dumps"} in pairs  # type: ignore[union-attr]
