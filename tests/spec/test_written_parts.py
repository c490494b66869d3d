"""Every kind of part as JSON and as text: there and back, and what is unknown, missing or misplaced refused by name."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields, replace
from typing import Any

import pytest
from small_grids import seer
from small_networks import SMALL
from small_parts import ATTENTION, DELTA_NET, DELTA_TIME, EXPERTS, FUSED, LATENT
from small_sounds import HEARER, HEARING
from small_tiles import tiled_seer
from test_bounds import BRANCH, MODEL, PREDICTOR, REFUSED, TAKEN, altered, stack

from asbuilt import spec
from asbuilt.errors import InputError
from asbuilt.spec import Part, RMSNorm, Rotary, TokenEmbedding, dumps, from_dict, loads, to_dict, walk_stored
from asbuilt.spec.json import ABSTRACT, DEEPEST, LONGEST, PARTS
from asbuilt.spec.show import LINE, show


def examples() -> dict[str, Part]:
    """One part of each kind, those that other tests make and what is in them."""
    found: dict[str, Part] = {}
    for part in (*(part for part, *_ in REFUSED), *(altered(part, changed) for part, changed in TAKEN)):
        for _, inner in walk_stored(part):
            found.setdefault(type(inner).__name__, inner)
    for _, inner in (*walk_stored(seer()), *walk_stored(tiled_seer())):
        found.setdefault(type(inner).__name__, inner)
    # without taps, which mergers belong to: either may be left out
    found["GridVision"] = replace(found["GridVision"], taps=(), mergers=())  # type: ignore[type-var]
    alone = spec.MLPProjector(widths=(6, 8), activation="gelu")
    found["TiledVision"] = replace(found["TiledVision"], taps=(), projector=alone)  # type: ignore[call-arg]
    found.setdefault("TypeEmbedding", spec.TypeEmbedding(n_types=2, d_model=4))
    found["Proportional"] = spec.Proportional(n_pairs=2)
    vectors = spec.PerLayerEmbedding(n_vocab=5, n_layers=1, d=2, d_model=6, norm=spec.RMSNorm(d=2))
    found["PerLayerEmbedding"] = vectors
    found["AxialPositions"] = spec.AxialPositions(n_entries=5, d_model=6)
    found["PerLayerInput"] = spec.PerLayerInput(d_model=6, d=2, activation="relu")
    found["LinearAttention"] = spec.LinearAttention(d_model=4, n_heads=2, d_head=3)
    found["LightningAttention"] = spec.LightningAttention(
        d_model=4, n_heads=2, d_head=3, decay=0.5, norm=spec.RMSNorm(d=6)
    )
    conv = spec.ShortConvolution(channels=14, kernel=3)
    found["Mamba"] = spec.Mamba(d_model=6, d_inner=14, d_state=3, dt_rank=2, conv=conv)
    found["Mamba2"] = spec.Mamba2(d_model=6, n_heads=2, d_head=4, d_state=3, conv=conv)
    embedding = spec.MelEmbedding(n_mels=2, n_tokens=3, d_model=4)
    found["MelEmbedding"], found["AudioEncoder"] = (
        embedding,
        spec.AudioEncoder(
            embedding=embedding,
            blocks=(spec.Block(branches=(spec.Branch(name="x", body=found["LinearAttention"]),)),),
            max_positions=3,  # type: ignore[arg-type]
        ),
    )
    found["AudioLanguageModel"], found["Hearing"] = HEARER, HEARING
    found["MelSubsampling"] = spec.MelSubsampling(n_mels=4, n_tokens=3, channels=(2, 3), d_model=4)
    found["SoftplusScale"] = spec.SoftplusScale(d=3)
    found["HyperConnection"] = spec.HyperConnection(n_streams=2, d_model=6)
    found["StreamMerge"] = spec.StreamMerge(n_streams=2, d_model=6)
    found["AlternatingUpdates"] = spec.AlternatingUpdates(n_streams=2, d_model=6, norm=spec.RMSNorm(d=6))
    found["ProjectedStreams"] = spec.ProjectedStreams(n_streams=2, d_model=6)
    found["Laurel"] = spec.Laurel(d_model=6, rank=2)
    found["Indexer"] = spec.Indexer(d_model=6, q_rank=3, n_heads=2, d_head=4, top_k=2)
    found["BlockIndexer"] = spec.BlockIndexer(d_model=6, n_heads=2, d_head=4, block=2, top_k=2)
    entries = spec.Compressor(d_model=6, d_head=4, ratio=2)
    found["Compressor"] = entries
    found["EntryIndexer"] = spec.EntryIndexer(q_rank=3, n_heads=2, top_k=2, compressor=entries)
    found["ConvolvedProjector"] = spec.ConvolvedProjector(d_in=3, d_out=4, n_side=3, steps=1)
    found["CompressedAttention"] = spec.CompressedAttention(
        d_model=6, n_heads=2, d_head=4, q_rank=3, window=3, groups=1, o_rank=2, compressor=entries
    )
    found["HeadNorm"] = spec.HeadNorm(d=3, n_heads=2)
    found["MatrixLSTM"] = spec.MatrixLSTM(d_model=6, n_heads=2, d_key=4, d_value=3, norm=spec.HeadNorm(d=3, n_heads=2))
    found["SharedChoice"] = spec.SharedChoice(top_k=2)
    found |= {type(part).__name__: part for part in SMALL}
    # without what leaves fewer keys and values: either may be left out
    found["GridAttention"] = spec.GridAttention(d_model=7, n_heads=3, d_head=2, norm=spec.RMSNorm(d=7))
    ffn = spec.MLP(d_model=6, d_ff=8, activation="relu")
    found["AttentionPooling"] = spec.AttentionPooling(d_model=6, n_heads=2, d_head=3, norm=spec.RMSNorm(d=6), ffn=ffn)
    found["XIELU"] = spec.XIELU()
    found["DiagonalStateSpace"] = spec.DiagonalStateSpace(d_model=4, d_state=3)
    table = spec.HashedTable(n=2, n_rows=7, d=3, d_model=4)
    found["HashedTable"], found["NGrams"] = table, spec.NGrams(n_vocab=5, tables=(table,))
    found["Recurrent"] = spec.Recurrent(d_model=4, d_hidden=6)
    found["CentredConvolution"] = spec.CentredConvolution(d_model=4, kernel=3)
    found["CausalConvolution"] = spec.CausalConvolution(d_model=4, kernel=3)
    conv = spec.ShortConvolution(channels=6, kernel=3)
    plain = replace(conv, activation=None)
    found["ConvolutionModule"] = spec.ConvolutionModule(d_model=4, conv=plain)
    found["GatedConvolution"] = spec.GatedConvolution(d_model=4, conv=conv)
    found["RGLRU"] = spec.RGLRU(d_model=4, d_rnn=6, n_heads=2, conv=conv, activation="gelu_tanh")
    found["GatedDeltaNet"] = DELTA_NET
    time, channel = (spec.TokenShift(d_model=4, targets=names) for names in (("k", "v", "r"), ("up", "r")))
    found["TimeMixing"] = spec.TimeMixing(d_model=4, d_state=6, shift=time)
    found["ChannelMixing"] = spec.ChannelMixing(d_model=4, d_ff=6, shift=channel)
    found["TokenShift"] = time
    found["DeltaTimeMixing"] = DELTA_TIME
    found["Differential"] = spec.Differential(n_heads=2, d_head=3, norm=spec.RMSNorm(d=6), start=0.5)
    found["ShortConvolution"] = spec.ShortConvolution(channels=4, kernel=3)
    found["Lora"] = spec.Lora(base=spec.Linear(d_in=4, d_out=6), rank=2, alpha=4.0)
    found["Packed"] = spec.Packed(base=spec.Linear(d_in=32, d_out=6), format="q4_0")
    found.setdefault("GatedMLP", spec.GatedMLP(d_model=4, d_ff=8, activation="silu"))
    both = spec.Attention(d_model=4, d_input=8, n_heads=1, n_kv_heads=1, d_head=2)
    shared = spec.SharedTransformer(attention=both, ffn=spec.GatedMLP(d_model=4, d_ff=8, activation="silu"))
    found["FusedPredictor"], found["SharedHead"] = FUSED, spec.SharedHead(d_model=6, n_vocab=5, tied=True)
    found["SharedTransformer"], found["SideTransformer"] = shared, spec.SideTransformer(shared=shared, rank=2)
    return found


EXAMPLES = examples()


def test_every_kind_is_written_and_read() -> None:
    exported = {
        name
        for name in spec.__all__
        if isinstance(value := getattr(spec, name), type) and issubclass(value, Part) and value not in ABSTRACT
    }
    assert {*PARTS} == exported == {*EXAMPLES}
    assert all(PARTS[name].__name__ == name for name in PARTS)


@pytest.mark.parametrize("kind", sorted(EXAMPLES))
def test_a_part_is_what_it_was(kind: str) -> None:
    part = EXAMPLES[kind]
    plain = to_dict(part)
    assert list(plain) == ["part", *(field.name for field in fields(part))]
    assert plain["part"] == kind
    assert from_dict(plain) == loads(dumps(part)) == loads(json.dumps(plain)) == part


@pytest.mark.parametrize("kind", sorted(EXAMPLES))
def test_unknown_and_missing_fields_are_refused_by_name(kind: str) -> None:
    plain = to_dict(EXAMPLES[kind])
    with pytest.raises(InputError, match=f"unknown field of {kind}") as refused:
        from_dict(plain | {"colour": 1}, "at")
    assert refused.value.field == "at.colour"
    for field in fields(EXAMPLES[kind]):
        left = {name: value for name, value in plain.items() if name != field.name}
        if field.default is MISSING:
            with pytest.raises(InputError, match=f"missing field of {kind}") as refused:
                from_dict(left, "at")
            assert refused.value.field == f"at.{field.name}"
        else:
            assert from_dict(left) == replace(EXAMPLES[kind], **{field.name: field.default})
            near = {f"{field.name}x": plain[field.name], **left}
            with pytest.raises(InputError, match=f"did you mean .*'{field.name}'"):
                from_dict(near)


@pytest.mark.parametrize("kind", sorted(EXAMPLES))
def test_a_part_that_belongs_elsewhere_is_refused_by_its_place(kind: str) -> None:
    """Where a part belongs nothing else fits, and where a number belongs no part does."""
    plain = to_dict(EXAMPLES[kind])
    other = {"part": "FrequencyFactors", "factors": [1.0]} if kind != "Rotary" else {"part": "RMSNorm", "d": 4}
    for field in fields(EXAMPLES[kind]):
        if not plain[field.name] or field.name == "factors":
            continue
        with pytest.raises(InputError) as refused:
            from_dict(plain | {field.name: other}, "at")
        assert field.name in refused.value.field or refused.value.problem.startswith(f"wrong type in {kind}")
        if isinstance(plain[field.name], dict):
            assert refused.value.field == f"at.{field.name}"
            assert refused.value.problem == f"wrong part for {kind}"
            assert refused.value.value == other


def test_what_is_allowed_in_a_place_is_listed() -> None:
    plain = to_dict(BRANCH)
    with pytest.raises(InputError) as refused:
        from_dict(plain | {"norm": {"part": "MLP", "d_model": 11, "d_ff": 1, "activation": "relu"}})
    assert refused.value.allowed == "LayerNorm or RMSNorm"
    for block in (1, {"part": "RMSNorm", "d": 11}):
        with pytest.raises(InputError, match="wrong part for Block") as refused:
            from_dict({"part": "Block", "branches": [plain, block]})
        assert (refused.value.field, refused.value.allowed) == ("spec.branches", "Branch")
    with pytest.raises(InputError, match="wrong part for Block"):
        from_dict({"part": "Block", "branches": plain})
    gating = to_dict(EXPERTS)
    with pytest.raises(InputError, match="wrong part for MixtureOfExperts"):
        from_dict(gating | {"gating": "clamped"})
    with pytest.raises(InputError, match="wrong part for MixtureOfExperts"):
        from_dict(gating | {"gating": 1})
    assert from_dict(gating | {"gating": "none"}) == replace(EXPERTS, gating="none")


def test_runs_of_equal_items_are_written_once() -> None:
    three = replace(MODEL, blocks=stack(ATTENTION, ATTENTION, replace(LATENT, d_model=11)))
    plain = to_dict(three)["blocks"]
    assert [item.get("repeat") for item in plain] == [2, None]
    assert plain[0] == {"repeat": 2, "item": to_dict(three.blocks[0])}
    assert plain[1] == to_dict(three.blocks[2])
    apart = replace(MODEL, blocks=(three.blocks[0], three.blocks[2], three.blocks[1]))
    assert [item.get("repeat") for item in to_dict(apart)["blocks"]] == [None, None, None]
    assert to_dict(replace(MODEL, predictors=(PREDICTOR,) * 3))["predictors"] == [
        {"repeat": 3, "item": to_dict(PREDICTOR)}
    ]
    numbers = spec.FrequencyFactors(factors=(1.0, 1.0, 2.0))  # numbers are not
    assert to_dict(numbers) == {"part": "FrequencyFactors", "factors": [1.0, 1.0, 2.0]}


@pytest.mark.parametrize("n", [0, -1, LONGEST + 1, 1.0, "2", True, None])
def test_a_repeat_is_a_number_within_bounds(n: Any) -> None:  # noqa: ANN401
    with pytest.raises(InputError, match="invalid repeat") as refused:
        from_dict({"part": "FrequencyFactors", "factors": [1.0, {"repeat": n, "item": 2.0}]})
    assert refused.value.field == "spec.factors.1"
    assert refused.value.allowed == "1 to 100000 in total"


def test_repeats_are_bounded_together() -> None:
    def read(*counts: int) -> Part:
        return from_dict({"part": "FrequencyFactors", "factors": [{"repeat": n, "item": 2.0} for n in counts]})

    assert read(1) == spec.FrequencyFactors(factors=(2.0,))
    assert read(2, 3) == spec.FrequencyFactors(factors=(2.0,) * 5)
    assert read(LONGEST - 1, 1) == spec.FrequencyFactors(factors=(2.0,) * LONGEST)
    with pytest.raises(InputError, match="invalid repeat"):
        read(LONGEST - 1, 2)
    # an item without a count, or with a third key, is not a repeat
    with pytest.raises(InputError, match='must be an object with a "part" key'):
        from_dict({"part": "FrequencyFactors", "factors": [{"item": 2.0}]})
    with pytest.raises(InputError, match='must be an object with a "part" key'):
        from_dict({"part": "FrequencyFactors", "factors": [{"repeat": 1, "item": 2.0, "also": 1}]})


def test_the_place_of_what_is_wrong_is_said() -> None:
    plain = json.loads(dumps(MODEL))
    plain["blocks"][0]["branches"][0]["body"]["d_ff"] = 0
    with pytest.raises(InputError) as refused:
        from_dict(plain)
    assert refused.value.field == "GatedMLP.d_ff"
    plain["blocks"][0]["branches"][0]["body"]["part"] = "GatedMLb"
    with pytest.raises(InputError) as refused:
        from_dict(plain)
    assert refused.value.field == "spec.blocks.0.branches.0.body"
    assert refused.value.fix == "did you mean 'GatedMLP'?"
    for data in ([], 1, None, {}, {"part": 1}, {"d": 4}):
        with pytest.raises(InputError, match='an object with a "part" key') as refused:
            from_dict(data, "here")
        assert refused.value.field == "here"
    with pytest.raises(InputError, match="unknown part"):
        from_dict({"part": "Part"})
    for kind, field, value in (("RMSNorm", "d", {"part": "RMSNorm", "d": 1}), ("PatchEmbedding", "image_size", [4])):
        with pytest.raises(InputError):
            from_dict(to_dict(EXAMPLES[kind]) | {field: value})


def test_nesting_is_bounded() -> None:
    def deep(levels: int) -> dict[str, Any]:
        inner: dict[str, Any] = to_dict(RMSNorm(d=4))
        for _ in range(levels):
            inner = {"part": "Branch", "name": "x", "body": inner}
        return inner

    with pytest.raises(InputError, match="nested too deeply") as refused:
        from_dict(deep(DEEPEST + 1))
    assert refused.value.allowed == "at most 16 levels"
    assert refused.value.field == "spec" + ".body" * 17
    with pytest.raises(InputError, match="wrong part for Branch"):
        from_dict(deep(DEEPEST))
    within = {"part": "Block", "branches": [{"repeat": 1, "item": deep(DEEPEST)}]}
    with pytest.raises(InputError, match="nested too deeply"):
        from_dict(within)
    with pytest.raises(InputError, match="nested too deeply"):
        from_dict(to_dict(MODEL), depth=DEEPEST)
    assert from_dict(to_dict(RMSNorm(d=4)), depth=DEEPEST) == RMSNorm(d=4)


def test_text_is_read_as_data_is() -> None:
    with pytest.raises(InputError, match=r"^spec: not JSON"):
        loads("{")
    assert dumps(RMSNorm(d=4)) == '{\n "part": "RMSNorm",\n "d": 4,\n "eps": 1e-06,\n "gain": "weight"\n}'
    with pytest.raises(InputError, match=r"RMSNorm\.eps"):
        loads('{"part": "RMSNorm", "d": 4, "eps": Infinity}')


def test_a_part_that_fits_a_line_is_on_one() -> None:
    norm, rotary = RMSNorm(d=5), Rotary(d_rotary=4, theta=500.0)
    assert show(norm) == "RMSNorm(d=5)"
    assert show(rotary) == "Rotary(d_rotary=4, theta=500.0)"
    assert show(spec.FrequencyFactors(factors=(1.0, 2.0))) == "FrequencyFactors(factors=(1.0, 2.0))"
    assert show(BRANCH) == "Branch(name='ffn', body=MLP(d_model=11, d_ff=13, activation='relu'))"
    one = spec.FrequencyFactors(factors=(*(1.0,) * 15, 10000.0))
    shown = show(one)
    assert len(shown) == LINE == 110
    assert show(one, 1) == "FrequencyFactors(\n   factors=(" + "1.0, " * 15 + "10000.0),\n )"
    assert show(MODEL.blocks[0], 0).startswith("Block(branches=[Branch(name='ffn'")


def test_what_repeats_is_shown_once_on_lines_of_its_own() -> None:
    block = spec.Block(branches=(BRANCH,))
    model = MODEL.changed(blocks=(block, block, spec.Block(branches=(replace(BRANCH, name="y"),))), head=None)
    line = "Block(branches=[Branch(name='{}', body=MLP(d_model=11, d_ff=13, activation='relu'))]),"
    assert show(model, 4) == "\n".join(
        (
            "TextEncoder(",
            "      embedding=TokenEmbedding(n_vocab=5, d_model=11),",
            "      blocks=[",
            "        2 × " + line.format("ffn"),
            "        " + line.format("y"),
            "      ],",
            "      max_positions=16,",
            "    )",
        )
    )
    assert show(spec.Block(branches=(BRANCH, replace(BRANCH, name="y")))) == (
        "Block(\n"
        "  branches=[\n"
        "    Branch(name='ffn', body=MLP(d_model=11, d_ff=13, activation='relu')),\n"
        "    Branch(name='y', body=MLP(d_model=11, d_ff=13, activation='relu')),\n"
        "  ],\n"
        ")"
    )


def test_nested_parts_are_indented_by_two() -> None:
    long = replace(
        ATTENTION, q_norm=RMSNorm(d=5, eps=1e-5), k_norm=RMSNorm(d=5, eps=1e-5), positions=Rotary(d_rotary=4)
    )
    assert show(spec.Branch(name="x", body=long)) == (
        "Branch(\n"
        "  name='x',\n"
        "  body=Attention(\n"
        "    d_model=11,\n"
        "    n_heads=6,\n"
        "    n_kv_heads=2,\n"
        "    d_head=5,\n"
        "    q_norm=RMSNorm(d=5, eps=1e-05),\n"
        "    k_norm=RMSNorm(d=5, eps=1e-05),\n"
        "    positions=Rotary(d_rotary=4),\n"
        "  ),\n"
        ")"
    )
    model = MODEL.changed(blocks=stack(long), head=None)
    block = show(model.blocks[0], 4)
    assert block.count("\n") > 10
    assert f"  blocks=[\n    {block},\n  ],\n" in show(model)
    assert repr(TokenEmbedding(n_vocab=5, d_model=4)).startswith("TokenEmbedding(n_vocab=5, d_model=4, scale")
