"""transfo-xl against the paper's equations, written out in loops (arXiv 1901.02860, section 3 and appendix B).

The tensors are made by their names on disk, so names, layouts and what is tied are tried too. transformers has no class
of this family any more.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from strategies import random_tokens
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from asbuilt import cost
from asbuilt.checkpoint.load import load
from asbuilt.checkpoint.save import save
from asbuilt.checkpoint.source import open_model
from asbuilt.errors import InputError
from asbuilt.families import read_config, write_config
from asbuilt.nn import build
from asbuilt.nn.cache import Cache
from asbuilt.nn.model import Model
from asbuilt.spec import Pass

Config = dict[str, Any]
Tensors = dict[str, Tensor]
SMALL: Config = {
    "architectures": ["TransfoXLLMHeadModel"],
    "model_type": "transfo-xl",
    "vocab_size": 31,
    "cutoffs": [5, 9, 20],
    "div_val": 2,
    "d_model": 6,
    "d_embed": 10,
    "n_layer": 3,
    "n_head": 3,
    "d_head": 4,
    "d_inner": 7,
    "mem_len": 5,
    "clamp_len": 2,
    "layer_norm_epsilon": 0.01,
    "untie_r": True,
    "tie_word_embeddings": True,
    "proj_share_all_but_first": True,
}
VARIANTS: dict[str, Config] = {
    "as published": {},
    "one pair of biases": {"untie_r": False},
    "norms before branches": {"pre_lnorm": True},
    "farther than the window": {"clamp_len": 40},
    "no farthest distance": {"clamp_len": -1},
    "own tables": {"tie_word_embeddings": False},
    "own maps": {"proj_share_all_but_first": False},
    "nothing tied": {"proj_share_all_but_first": False, "tie_word_embeddings": False},
    "one cluster": {"cutoffs": []},
    "one layer": {"n_layer": 1, "cutoffs": [11], "d_embed": 6, "mem_len": 2},
}


def made(config: Config, seed: int) -> Tensors:
    """Every tensor of a file, drawn, under its name on disk; of what is tied only one copy."""
    generator = torch.Generator().manual_seed(seed)
    d, heads, width = config["d_model"], config["n_head"], config["n_head"] * config["d_head"]
    ends = [0, *config["cutoffs"], config["vocab_size"]]
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(len(ends) - 1):
        rows, narrow = ends[i + 1] - ends[i], config["d_embed"] // config["div_val"] ** i
        shapes[f"transformer.word_emb.emb_layers.{i}.weight"] = rows, narrow
        shapes[f"transformer.word_emb.emb_projs.{i}"] = d, narrow
        shapes[f"crit.out_layers.{i}.bias"] = (rows,)
        if not config["tie_word_embeddings"]:
            shapes[f"crit.out_layers.{i}.weight"] = rows, narrow
        if i == 0 or not config["proj_share_all_but_first"]:
            shapes[f"crit.out_projs.{i}"] = d, narrow
    if config["cutoffs"]:
        shapes["crit.cluster_weight"] = len(config["cutoffs"]), config["d_embed"]
        shapes["crit.cluster_bias"] = (len(config["cutoffs"]),)
    vectors = {"r_w_bias": (heads, config["d_head"]), "r_r_bias": (heads, config["d_head"])}
    shapes |= {} if config["untie_r"] else {f"transformer.{name}": shape for name, shape in vectors.items()}
    for i in range(config["n_layer"]):
        attention, ffn = f"transformer.layers.{i}.dec_attn.", f"transformer.layers.{i}.pos_ff."
        shapes |= {f"{attention}{name}": shape for name, shape in vectors.items()} if config["untie_r"] else {}
        shapes |= {f"{attention}qkv_net.weight": (3 * width, d), f"{attention}r_net.weight": (width, d)}
        shapes[f"{attention}o_net.weight"] = d, width
        shapes |= {f"{at}layer_norm.{kind}": (d,) for at in (attention, ffn) for kind in ("weight", "bias")}
        for layer, rows, columns in (("0", config["d_inner"], d), ("3", d, config["d_inner"])):
            shapes |= {f"{ffn}CoreNet.{layer}.weight": (rows, columns), f"{ffn}CoreNet.{layer}.bias": (rows,)}
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) * 0.6 for name, shape in shapes.items()}


class Paper:
    """The model in plain torch, one query and key after the other; `memories` hold each layer's last inputs."""

    def __init__(self, config: Config, tensors: Tensors) -> None:
        self.config, self.tensors = config, tensors
        self.ends = [0, *config["cutoffs"], config["vocab_size"]]
        self.memories: list[Tensor] = [torch.zeros(0, config["d_model"]).double()] * config["n_layer"]

    def __call__(self, tokens_T: Tensor) -> list[Tensor]:
        """Returns the stream before the first layer and after each, and the log-probabilities, of one segment."""
        x = torch.stack([self.embedded(int(token)) for token in tokens_T])
        found = [x]
        for i in range(self.config["n_layer"]):
            memory, self.memories[i] = self.memories[i], torch.cat((self.memories[i], x))[-self.config["mem_len"] :]
            x = self.layer(i, x, memory)
            found.append(x)
        return [*found, torch.stack([self.log_probabilities(one) for one in x])]

    def embedded(self, token: int) -> Tensor:
        i = next(i for i, end in enumerate(self.ends[1:]) if token < end)
        row = self.tensors[f"transformer.word_emb.emb_layers.{i}.weight"][token - self.ends[i]]
        return self.tensors[f"transformer.word_emb.emb_projs.{i}"] @ row * self.config["d_model"] ** 0.5

    def layer(self, i: int, x: Tensor, memory: Tensor) -> Tensor:
        attention, ffn = f"transformer.layers.{i}.dec_attn.", f"transformer.layers.{i}.pos_ff."
        if self.config.get("pre_lnorm"):
            every = self.norm(torch.cat((memory, x)), attention)
            x = x + self.attention(attention, every, len(memory))
            return x + self.mlp(ffn, self.norm(x, ffn))
        x = self.norm(x + self.attention(attention, torch.cat((memory, x)), len(memory)), attention)
        return self.norm(x + self.mlp(ffn, x), ffn)

    def norm(self, x: Tensor, at: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + self.config["layer_norm_epsilon"]).sqrt()
        return scaled * self.tensors[f"{at}layer_norm.weight"] + self.tensors[f"{at}layer_norm.bias"]

    def mlp(self, at: str, x: Tensor) -> Tensor:
        w, b = ([self.tensors[f"{at}CoreNet.{layer}.{kind}"] for layer in ("0", "3")] for kind in ("weight", "bias"))
        return (x @ w[0].T + b[0]).clamp(min=0) @ w[1].T + b[1]

    def attention(self, at: str, every: Tensor, past: int) -> Tensor:
        """Scores W_q E_i . W_k E_j + W_q E_i . W_r R_(i-j) + u . W_k E_j + v . W_r R_(i-j), over sqrt(d_head)."""
        config = self.config
        shape = config["n_head"], config["d_head"]
        q, k, v = (every @ w.T for w in self.tensors[f"{at}qkv_net.weight"].chunk(3))
        whose = at if config["untie_r"] else "transformer."
        to_keys, to_distances = self.tensors[f"{whose}r_w_bias"], self.tensors[f"{whose}r_r_bias"]
        out = []
        for i in range(past, len(every)):
            seen = range(max(0, i - config["mem_len"] + 1), i + 1)
            query, heads = q[i].view(shape), []
            for h in range(shape[0]):
                scores = []
                for j in seen:
                    key, far = (
                        k[j].view(shape)[h],
                        (self.tensors[f"{at}r_net.weight"] @ self.sinusoids(i - j)).view(shape)[h],
                    )
                    scores.append((query[h] + to_keys[h]) @ key + (query[h] + to_distances[h]) @ far)
                shares = torch.softmax(torch.stack(scores) / config["d_head"] ** 0.5, 0)
                heads.append(sum(share * v[j].view(shape)[h] for share, j in zip(shares, seen, strict=True)))
            out.append(torch.cat(heads))
        return torch.stack(out) @ self.tensors[f"{at}o_net.weight"].T

    def sinusoids(self, distance: int) -> Tensor:
        farthest, d = self.config["clamp_len"], self.config["d_model"]
        distance = min(distance, farthest) if farthest > 0 else distance
        angles = distance / 10000 ** (torch.arange(0, d, 2, dtype=torch.float64) / d)
        return torch.cat((angles.sin(), angles.cos()))

    def log_probabilities(self, x: Tensor) -> Tensor:
        """Of the first cluster's tokens as they are, of others beside that of their cluster (arXiv 1609.04309)."""
        first = self.logits(x, 0).log_softmax(0)
        n = self.ends[1]
        tails = [first[n + i - 1] + self.logits(x, i).log_softmax(0) for i in range(1, len(self.ends) - 1)]
        return torch.cat((first[:n], *tails))

    def logits(self, x: Tensor, i: int) -> Tensor:
        narrow = x @ self.tied(f"crit.out_projs.{i}", f"transformer.word_emb.emb_projs.{i}")
        w = self.tied(f"crit.out_layers.{i}.weight", f"transformer.word_emb.emb_layers.{i}.weight")
        found = w @ narrow + self.tensors[f"crit.out_layers.{i}.bias"]
        if i or len(self.ends) == 2:
            return found
        return torch.cat((found, self.tensors["crit.cluster_weight"] @ narrow + self.tensors["crit.cluster_bias"]))

    def tied(self, own: str, embedding: str) -> Tensor:
        return self.tensors.get(own, self.tensors[embedding])


def stored(config: Config, folder: Path, seed: int) -> Tensors:
    """Writes a folder of drawn tensors, and returns them."""
    folder.mkdir(exist_ok=True)
    tensors = made(config, seed)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def activations(model: Model, tokens_BT: Tensor) -> list[Tensor]:
    """The stream before the first block and after each, and the log-probabilities."""
    found: list[Tensor] = []

    def see(module: nn.Module, given: tuple[Any, ...], x: Tensor) -> None:
        found.append(x)

    hooks = [one.register_forward_hook(see) for one in (model.embedding, *model.blocks)]
    out = model(tokens_BT)
    for hook in hooks:
        hook.remove()
    return [*found, out]


@pytest.fixture(params=[*VARIANTS])
def config(request: pytest.FixtureRequest) -> Config:
    return SMALL | VARIANTS[request.param]


@torch.no_grad()
def test_all_activations_are_the_papers(config: Config, tmp_path: Path) -> None:
    tensors = stored(config, tmp_path, seed=torch.randint(2**31, ()).item())  # type: ignore[arg-type]
    model = load(tmp_path, dtype="float64")
    tokens = random_tokens(config["vocab_size"], 13, seed=1)
    for have, want in zip(activations(model, tokens[None]), Paper(config, tensors)(tokens), strict=True):
        torch.testing.assert_close(have[0], want, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_segments_with_memory_are_the_papers_and_the_whole_text(config: Config, tmp_path: Path) -> None:
    """Cut anywhere, the text gives what it gives at once, and what the paper's recurrence gives."""
    tensors = stored(config, tmp_path, seed=2)
    model = load(tmp_path, dtype="float64")
    tokens = random_tokens(config["vocab_size"], 17, seed=3)
    whole = model(tokens[None])[0]
    for sizes in ([1] * 17, [17], [3, 1, 6, 1, 1, 5], [7, 7, 3]):
        cache = Cache(model.spec, batch=1, capacity=17, dtype=torch.float64)
        paper = Paper(config, tensors)
        for part, rows in zip(tokens.split(sizes), whole.split(sizes), strict=True):
            have = model(part[None], cache=cache)[0]
            torch.testing.assert_close(have, rows, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(have, paper(part)[-1], rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_rows_of_a_batch_are_apart(config: Config, tmp_path: Path) -> None:
    """Padding on either side changes no row, in the first pass and after."""
    stored(config, tmp_path, seed=4)
    model = load(tmp_path, dtype="float64")
    lengths = (3, 11, 7)
    rows = [random_tokens(config["vocab_size"], n + 4, seed=n) for n in lengths]
    both = [*zip(rows, lengths, strict=True)]
    for left in (True, False):
        begin = torch.zeros(3, 11, dtype=torch.long)
        valid = torch.zeros(3, 11, dtype=torch.bool)
        for b, n in enumerate(lengths):
            place = slice(11 - n, 11) if left else slice(0, n)
            begin[b, place], valid[b, place] = rows[b][:n], True
        cache = Cache(model.spec, batch=3, capacity=15, dtype=torch.float64)
        first = model(begin, cache=cache, valid_BT=valid)
        cut = lambda first, last: torch.stack([row[n + first : n + last] for row, n in both])  # noqa: E731
        steps = [model(cut(first, last), cache=cache) for first, last in ((0, 1), (1, 2), (2, 4))]
        for b, n in enumerate(lengths):
            alone = model(rows[b][None])[0]
            torch.testing.assert_close(first[b][valid[b]], alone[:n], rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(torch.cat([step[b] for step in steps]), alone[n:], rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_every_tensor_is_read_and_written(config: Config, tmp_path: Path) -> None:
    """What is loaded is saved bit by bit, and each tensor changes what comes out."""
    tensors = stored(config, tmp_path / "first", seed=5)
    source = open_model(tmp_path / "first")
    model = load(tmp_path / "first", dtype="float64")
    save(model, tmp_path / "second", family="transfo-xl", carried=source.reading.carried)
    again = load_file(tmp_path / "second" / "model.safetensors")
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)
    written = json.loads((tmp_path / "second" / "config.json").read_text())
    assert {key: written.get(key) for key in config} == config | {"div_val": written["div_val"]}
    tokens = torch.arange(config["vocab_size"])[None]
    want = model(tokens)
    for name, tensor in tensors.items():
        save_file(tensors | {name: tensor + torch.randn_like(tensor)}, tmp_path / "first" / "model.safetensors")
        changed = load(tmp_path / "first", dtype="float64")(tokens)
        assert not torch.allclose(changed, want, atol=1e-6), name


@torch.no_grad()
def test_what_is_stored_again_is_read(tmp_path: Path) -> None:
    """Files of torch's own format had tied tensors under each of their names."""
    config = SMALL | {"untie_r": False}
    tensors = stored(config, tmp_path, seed=6)
    want = load(tmp_path, dtype="float64")(torch.arange(31)[None])
    again = dict(tensors)
    for i in range(4):
        again[f"crit.out_layers.{i}.weight"] = tensors[f"transformer.word_emb.emb_layers.{i}.weight"].clone()
        if i:
            again[f"crit.out_projs.{i}"] = tensors[f"transformer.word_emb.emb_projs.{i}"].clone()
    for i in range(3):
        for bias in ("r_w_bias", "r_r_bias"):
            again[f"transformer.layers.{i}.dec_attn.{bias}"] = tensors[f"transformer.{bias}"].clone()
    again["transformer.pos_emb.inv_freq"] = torch.ones(3)
    save_file(again, tmp_path / "model.safetensors")
    assert torch.equal(load(tmp_path, dtype="float64")(torch.arange(31)[None]), want)
    # biases of one layer are its own or shared: under either name
    tensors = stored(config | {"n_layer": 1}, tmp_path, seed=7)
    want = Paper(config | {"n_layer": 1}, tensors)(torch.arange(31))[-1]
    torch.testing.assert_close(load(tmp_path, dtype="float64")(torch.arange(31)[None])[0], want, rtol=1e-9, atol=1e-9)


def test_the_published_model() -> None:
    """The paper's 257M parameters leave out what is looked up alone; the memory is the inputs of 18 layers, no more."""
    path = Path(__file__).parents[3] / "shared" / "models" / "transfo-xl-wt103.json"
    if not path.exists():
        pytest.skip(f"no published models at {path.parent}")
    config = json.loads(path.read_text())
    spec = read_config(config, "x").spec
    tables = sum(n * d for n, d in ((20_000, 1024), (20_000, 256), (160_000, 64), (67_735, 16)))
    maps = 1024 * (1024 + 256 + 64 + 16)
    layer = 5 * 1024 * 1024 + 2 * 1024 + 2 * 1024 * 4096 + 4096 + 1024 + 4 * 1024
    head = 267_735 + 3 * (1024 + 1) + 1024 * 1024
    assert cost.total_parameters(spec) == tables + maps + 18 * layer + head == 285_205_322
    one = read_config(config | {"untie_r": False}, "x").spec
    assert cost.total_parameters(one) == 285_205_322 - 17 * 2 * 1024 == 285_170_506
    bill = cost.cache(spec, 4000, "bf16")
    assert (bill.per_token, bill.unbounded, bill.window) == (18 * 1024 * 2, 0, 18 * 1024 * 2 * 1600)
    assert (
        write_config("transfo-xl", spec, {}, None).items()
        >= {
            key: value
            for key, value in config.items()
            if key not in ("adaptive", "attn_type", "same_length", "tie_weight")
        }.items()
    )


def test_costs_are_counted_and_allocated(config: Config) -> None:
    """FLOPs of first passes, segments and single tokens, written out; bytes of the memory as allocated."""
    spec = read_config(config, "x").spec
    model = build(spec, device="meta")
    for tokens, past in ((9, 0), (1, 3), (1, 9), (4, 2), (4, 9)):
        cache = Cache(spec, batch=2, capacity=past + tokens, dtype=torch.float32, device="meta")
        cache.lengths = (past, past)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(torch.zeros(2, tokens, dtype=torch.long, device="meta"), cache=cache, kernel="reference")
        assert counter.get_total_flops() == flops(config, 2, tokens, past)
        assert cost.flops(spec, Pass(tokens=tokens, batch=2, past=past)).forward == flops(config, 2, tokens, past)
    allocated = Cache(spec, batch=2, capacity=12, dtype=torch.float32).nbytes
    assert allocated == 2 * cost.cache(spec, 12, "fp32").at_seq
    assert allocated == 2 * 4 * config["n_layer"] * config["d_model"] * config["mem_len"]


def flops(config: Config, batch: int, tokens: int, past: int) -> int:
    d, wide, memory = config["d_model"], config["n_head"] * config["d_head"], config["mem_len"]
    keys = min(past + 1, memory) if tokens == 1 else min(past, memory) + tokens
    distances = min(past + tokens, memory, config["clamp_len"] + 1 if config["clamp_len"] > 0 else memory)
    rows = batch * tokens
    layer = rows * d * wide + 2 * batch * keys * d * wide + distances * d * wide + rows * wide * distances
    layer += 2 * rows * keys * wide + rows * wide * d + 2 * rows * d * config["d_inner"]
    ends = [0, *config["cutoffs"], config["vocab_size"]]
    widths = [config["d_embed"] // config["div_val"] ** i for i in range(len(ends) - 1)]
    classes = [b - a for a, b in pairwise(ends)]
    classes[0] += len(config["cutoffs"])
    ends_of = 2 * d * sum(widths) + sum(n * width for n, width in zip(classes, widths, strict=True))
    return 2 * (config["n_layer"] * layer + rows * ends_of)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("same_length", False),
        ("attn_type", 1),
        ("adaptive", False),
        ("sample_softmax", 5),
        ("mem_len", 0),
        ("div_val", 1),
        ("div_val", 7),
        ("clamp_len", -2),
        ("clamp_len", 1.5),
        ("d_model", 7),
        ("cutoffs", [5, 5]),
        ("cutoffs", [0, 5]),
        ("cutoffs", [5, 31]),
        ("cutoffs", [True, 5]),
        ("cutoffs", 5),
        ("cutoffs", None),
        ("cutoffs", [*range(1, 31)] * 9),
        ("tie_projs", [True, True, True, True]),
        ("tie_projs", [False, True]),
        ("tie_weight", False),
        ("untie_r", None),
        ("window", 4),
        ("architectures", ["TransfoXLForSequenceClassification"]),
    ],
)
def test_what_is_refused_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(InputError, match=key):
        read_config(SMALL | {key: value}, "x")


def test_class_defaults_and_spellings() -> None:
    """A config of sizes alone is the published model; the older spelling of what is tied; no clamp."""
    spec = read_config({"model_type": "transfo-xl"}, "x").spec
    assert cost.total_parameters(spec) == 285_205_322
    old = {key: value for key, value in SMALL.items() if key != "tie_word_embeddings"} | {"tie_weight": False}
    new = SMALL | {"tie_word_embeddings": False}
    assert read_config(old, "x").spec == read_config(new, "x").spec != read_config(SMALL, "x").spec
    lengths = [read_config(SMALL | {"clamp_len": n}, "x").spec for n in (0, -1, 3)]
    assert lengths[0] == lengths[1] != lengths[2]


@given(st.integers(2, 60), st.integers(2, 9), st.lists(st.integers(1, 30), unique=True, max_size=4))
def test_written_reads_back(d_embed: int, divisor: int, cutoffs: list[int]) -> None:
    config = SMALL | {"d_embed": d_embed, "div_val": divisor, "cutoffs": sorted(cutoffs)}
    assume(d_embed // divisor ** len(cutoffs))
    reading = read_config(config, "x")
    again = write_config("transfo-xl", reading.spec, reading.carried, None)
    assert read_config(again, "x").spec == reading.spec
    widths = [d_embed // again["div_val"] ** i for i in range(len(cutoffs) + 1)]
    assert widths == [d_embed // divisor**i for i in range(len(cutoffs) + 1)]


def test_other_models_are_refused_by_name() -> None:
    """What files of this family cannot say."""
    spec = read_config(SMALL, "x").spec
    changed = {
        "head": spec.edit("head.clusters.1", tied=False),
        "max_distance": spec.edit("blocks.1.attention.body.positions", max_distance=None),
        "window": spec.edit("blocks.*.attention.body", window=4, positions=None),
        "scale": spec.edit("embedding", scale=1.0),
    }
    for model in changed.values():
        with pytest.raises(InputError):
            write_config("transfo-xl", model, {}, None)
