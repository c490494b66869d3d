"""Published models in our own form: one row of dimensions each, with the source the numbers come from.

A row is checked against the published parameter count by the tests. `dtype` is what the published weights are stored
in, None where none were published. Contexts are those the model was made for.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from asbuilt.errors import InputError, near
from asbuilt.families import FAMILIES
from asbuilt.families.shared import indexers, latent
from asbuilt.families.shared.experts import corrected_router
from asbuilt.families.shared.sizes import every_but_last
from asbuilt.families.shared.towers import tower
from asbuilt.spec import (
    Activation,
    CentredConvolution,
    Classifier,
    Disentangled,
    ExpertGroups,
    HeadTransform,
    LanguageModel,
    LinearScaling,
    Llama3Scaling,
    Model,
    Pooler,
    QueryTemperature,
    Rotary,
    Router,
    Scaling,
    Sections,
    YaRN,
)

if TYPE_CHECKING:
    from asbuilt.families import (
        albert,
        bart,
        bert,
        bloom,
        chinchilla,
        clip,
        cohere,
        deberta_v2,
        deepseek,
        deepseek_v4,
        dinov2,
        dinov3_vit,
        exaone4,
        falcon,
        gemma,
        gemma3,
        glm4_moe,
        gpt2,
        gpt_neox,
        gpt_oss,
        jamba,
        kimi_k25,
        lfm2,
        lfm2_vl,
        llama,
        llama4,
        llama4_text,
        llava,
        mamba,
        mamba2,
        marian,
        mimo_v2_flash,
        minimax_m2,
        mistral,
        mistral3,
        mixtral,
        mllama,
        modernbert,
        mpt,
        nemotron_h,
        nomic_bert,
        olmo,
        olmo2,
        olmo3,
        olmoe,
        opt,
        paligemma,
        palm,
        phi,
        phi3,
        qwen2,
        qwen2_5_vl,
        qwen3,
        qwen3_moe,
        qwen3_next,
        qwen3_vl,
        recurrent_gemma,
        rwkv,
        rwkv7,
        siglip,
        starcoder2,
        switch_transformers,
        t5,
        transfo_xl,
        voxtral,
        whisper,
        xlstm,
        zamba2,
    )
    from asbuilt.families.shared.family import Family


class _Kin:
    """What families.NAME.FAMILY is, imported when a model is built of it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def build(self, **sizes: Any) -> Model:  # noqa: ANN401  the family's own
        return import_module(f"asbuilt.families.{self.name}").FAMILY.build(**sizes)


class _Module:
    """A family's module, imported when something of it is called: a catalogue of one row needs one family."""

    def __init__(self, name: str) -> None:
        self.name, self.FAMILY = name, _Kin(name)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *given, **named: getattr(import_module(f"asbuilt.families.{self.name}"), name)(*given, **named)


if not TYPE_CHECKING:
    globals().update((name, _Module(name)) for name in (family.replace("-", "_") for family in FAMILIES))


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One published model; `spec()` builds its description.

    `quantization` is the published config's `quantization_config`, None if the weights are not quantised.
    """

    name: str
    family: str
    source: str
    dtype: str | None
    make: Callable[[], Model]
    quantization: dict[str, Any] | None = None

    def spec(self) -> Model:
        """Returns the model's description, built anew."""
        return self.make()


ROWS: dict[str, Entry] = {}

GPT2_SOURCE = "Radford et al. 2019, Table 2; config of openai-community/"
GPT3_SOURCE = "Brown et al. 2020, arXiv 2005.14165, Table 2.1"
LLAMA1_SOURCE = "Touvron et al. 2023, arXiv 2302.13971, Table 2"
LLAMA2_SOURCE = "Touvron et al. 2023, arXiv 2307.09288; config of meta-llama/"
LLAMA3_SOURCE = "Grattafiori et al. 2024, arXiv 2407.21783, Table 3; config of meta-llama/"
SMOLLM2_SOURCE = "Allal et al. 2025, arXiv 2502.02737; config of HuggingFaceTB/"


def _gpt2(
    name: str, layers: int, d_model: int, heads: int, source: str, dtype: str | None = "float32", *, context: int = 1024
) -> None:
    make = partial(
        gpt2.build, n_vocab=50257, d_model=d_model, n_layers=layers, n_heads=heads, max_positions=context, name=name
    )
    ROWS[name] = Entry(name=name, family="gpt2", source=source, dtype=dtype, make=make)


def _llama(
    name: str,
    layers: int,
    d_model: int,
    heads: int,
    kv_heads: int,
    d_ff: int,
    source: str,
    dtype: str,
    *,
    vocab: int,
    context: int,
    theta: float = 10000.0,
    stretched: float | None = None,
    eps: float = 1e-5,
    tied: bool = False,
) -> None:
    """Adds a row; `stretched` is the factor by which Llama 3.1 and its kin reach beyond their first 8192 tokens."""

    def make() -> Model:
        usual = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_context": 8192}
        scaling = None if stretched is None else Llama3Scaling(factor=stretched, **usual)
        rotary = Rotary(d_rotary=d_model // heads, theta=theta, scaling=scaling)
        return llama.build(
            n_vocab=vocab,
            d_model=d_model,
            n_layers=layers,
            n_heads=heads,
            n_kv_heads=kv_heads,
            d_ff=d_ff,
            max_positions=context,
            rotary=rotary,
            eps=eps,
            tied=tied,
            name=name,
        )

    ROWS[name] = Entry(name=name, family="llama", source=source, dtype=dtype, make=make)


# layers, d_model, heads
_gpt2("distilgpt2", 6, 768, 12, "config of distilbert/distilgpt2")
_gpt2("gpt2", 12, 768, 12, GPT2_SOURCE + "gpt2")
_gpt2("gpt2-medium", 24, 1024, 16, GPT2_SOURCE + "gpt2-medium")
_gpt2("gpt2-large", 36, 1280, 20, GPT2_SOURCE + "gpt2-large")
_gpt2("gpt2-xl", 48, 1600, 25, GPT2_SOURCE + "gpt2-xl")
# the paper alternates dense and banded layers, which changes no parameter; every layer is dense here
_gpt2("gpt3-175b", 96, 12288, 96, GPT3_SOURCE, None, context=2048)

# layers, d_model, heads, key/value heads, d_ff
_llama1 = partial(_llama, source=LLAMA1_SOURCE, dtype="float16", vocab=32000, context=2048, eps=1e-6)
_llama1("llama-1-7b", 32, 4096, 32, 32, 11008)
_llama1("llama-1-13b", 40, 5120, 40, 40, 13824)
_llama1("llama-1-30b", 60, 6656, 52, 52, 17920)
_llama1("llama-1-65b", 80, 8192, 64, 64, 22016, eps=1e-5)

_llama2 = partial(_llama, dtype="float16", vocab=32000, context=4096)
_llama2("llama-2-7b", 32, 4096, 32, 32, 11008, source=LLAMA2_SOURCE + "Llama-2-7b-hf")
_llama2("llama-2-13b", 40, 5120, 40, 40, 13824, source=LLAMA2_SOURCE + "Llama-2-13b-hf")
_llama2("llama-2-70b", 80, 8192, 64, 8, 28672, source=LLAMA2_SOURCE + "Llama-2-70b-hf")

_llama3 = partial(_llama, dtype="bfloat16", vocab=128256, theta=500000.0)
_llama3("llama-3-8b", 32, 4096, 32, 8, 14336, source=LLAMA3_SOURCE + "Meta-Llama-3-8B", context=8192)
_llama3("llama-3-70b", 80, 8192, 64, 8, 28672, source=LLAMA3_SOURCE + "Meta-Llama-3-70B", context=8192)
_llama31 = partial(_llama3, context=131072, stretched=8.0)
_llama31("llama-3.1-8b", 32, 4096, 32, 8, 14336, source=LLAMA3_SOURCE + "Llama-3.1-8B")
_llama31("llama-3.1-70b", 80, 8192, 64, 8, 28672, source=LLAMA3_SOURCE + "Llama-3.1-70B")
_llama31("llama-3.1-405b", 126, 16384, 128, 8, 53248, source=LLAMA3_SOURCE + "Llama-3.1-405B")
_llama31("llama-3.3-70b", 80, 8192, 64, 8, 28672, source="config of meta-llama/Llama-3.3-70B-Instruct")
_llama32 = partial(_llama3, context=131072, stretched=32.0, tied=True)
_llama32("llama-3.2-1b", 16, 2048, 32, 8, 8192, source="config of meta-llama/Llama-3.2-1B")
_llama32("llama-3.2-3b", 28, 3072, 24, 8, 8192, source="config of meta-llama/Llama-3.2-3B")

_smollm2 = partial(_llama, dtype="bfloat16", vocab=49152, context=8192, tied=True)
_smollm2("smollm2-135m", 30, 576, 9, 3, 1536, source=SMOLLM2_SOURCE + "SmolLM2-135M", theta=100000.0)
_smollm2("smollm2-360m", 32, 960, 15, 5, 2560, source=SMOLLM2_SOURCE + "SmolLM2-360M", theta=100000.0)
_smollm2("smollm2-1.7b", 24, 2048, 32, 32, 8192, source=SMOLLM2_SOURCE + "SmolLM2-1.7B", theta=130000.0)

TINYLLAMA_SOURCE = "Zhang et al. 2024, arXiv 2401.02385; config of TinyLlama/TinyLlama-1.1B-Chat-v1.0"
_llama("tinyllama-1.1b", 22, 2048, 32, 4, 5632, TINYLLAMA_SOURCE, "bfloat16", vocab=32000, context=2048)


def _gpt_neox(
    name: str, layers: int, d_model: int, heads: int, source: str, *, vocab: int, activation: Activation
) -> None:
    rotary = Rotary(d_rotary=d_model // heads // 4)
    make = partial(
        gpt_neox.FAMILY.build,
        n_vocab=vocab,
        d_model=d_model,
        n_layers=layers,
        n_heads=heads,
        d_ff=4 * d_model,
        max_positions=2048,
        d_head=d_model // heads,
        rotary=rotary,
        activation=activation,
        name=name,
    )
    ROWS[name] = Entry(name=name, family="gpt_neox", source=source, dtype="float16", make=make)


NEOX_SOURCE = "Black et al. 2022, arXiv 2204.06745, Table 1; config of EleutherAI/gpt-neox-20b"
_gpt_neox("gpt-neox-20b", 44, 6144, 64, NEOX_SOURCE, vocab=50432, activation="gelu_tanh")
PYTHIA_SOURCE = "Biderman et al. 2023, arXiv 2304.01373, Table 1; config of EleutherAI/pythia-70m"
_gpt_neox("pythia-70m", 6, 512, 8, PYTHIA_SOURCE, vocab=50304, activation="gelu")


def _opt_1_3b() -> Model:
    return opt.build(
        n_vocab=50272, d_model=2048, n_layers=24, n_heads=32, d_ff=8192, max_positions=2048, name="opt-1.3b"
    )


def _bert(name: str, layers: int, d_model: int, source: str, *, dtype: str = "float32", masked: bool = True) -> None:
    make = partial(
        bert.build,
        n_vocab=30522,
        d_model=d_model,
        n_layers=layers,
        n_heads=12,
        d_ff=4 * d_model,
        max_positions=512,
        n_types=2,
        eps=1e-12,
        masked=masked,
        pooled=not masked,
        name=name,
    )
    ROWS[name] = Entry(name=name, family="bert", source=source, dtype=dtype, make=make)


_bert("bert-base-uncased", 12, 768, "Devlin et al. 2018, arXiv 1810.04805; config of google-bert/bert-base-uncased")
MINILM_SOURCE = "Wang et al. 2020, arXiv 2002.10957; config of sentence-transformers/all-MiniLM-L6-v2"
_bert("all-minilm-l6-v2", 6, 384, MINILM_SOURCE, masked=False)


def _roberta(name: str, family: str, source: str, **sizes: Any) -> None:  # noqa: ANN401
    """Adds a row with one type of tokens, and positions from the third row of their table on."""
    usual: dict[str, Any] = {"d_model": 768, "n_layers": 12, "n_heads": 12, "d_ff": 3072, "max_positions": 512}
    usual |= {"n_types": 1, "eps": 1e-5, "offset": 2, "head_activation": "gelu"}
    build = partial(bert.build, name=name, **usual | sizes)
    ROWS[name] = Entry(name=name, family=family, source=source, dtype="float32", make=build)


ROBERTA_SOURCE = "Liu et al. 2019, arXiv 1907.11692, Appendix B; config of FacebookAI/roberta-base"
_roberta("roberta-base", "roberta", ROBERTA_SOURCE, n_vocab=50265)
XLM_ROBERTA_SOURCE = "Conneau et al. 2019, arXiv 1911.02116, section 4; config of FacebookAI/xlm-roberta-base"
_roberta("xlm-roberta-base", "xlm-roberta", XLM_ROBERTA_SOURCE, n_vocab=250002)
_roberta(
    "bge-m3",
    "xlm-roberta",
    "Chen et al. 2024, arXiv 2402.03216; config of BAAI/bge-m3",
    n_vocab=250002,
    d_model=1024,
    n_layers=24,
    n_heads=16,
    d_ff=4096,
    max_positions=8192,
    masked=False,
    pooled=True,
)


DISTILBERT_SOURCE = "Sanh et al. 2019, arXiv 1910.01108, section 3; config of distilbert/distilbert-base-uncased"
MPNET_SOURCE = "Song et al. 2020, arXiv 2004.09297; config of sentence-transformers/all-mpnet-base-v2"
_BASE: dict[str, Any] = {"d_model": 768, "n_heads": 12, "d_ff": 3072, "max_positions": 512}
_make_distilbert = partial(bert.build, n_vocab=30522, n_layers=6, name="distilbert-base-uncased", **_BASE)
ROWS["distilbert-base-uncased"] = Entry(
    name="distilbert-base-uncased",
    family="distilbert",
    source=DISTILBERT_SOURCE,
    dtype="float32",
    make=_make_distilbert,
)


_make_albert = partial(
    albert.build,
    n_vocab=30000,
    d_embedding=128,
    n_layers=12,
    n_types=2,
    activation="gelu_tanh",
    name="albert-base-v2",
    **_BASE,
)
ROWS["albert-base-v2"] = Entry(
    name="albert-base-v2",
    family="albert",
    source="Lan et al. 2019, arXiv 1909.11942, Table 1; config of albert/albert-base-v2",
    dtype="float32",
    make=_make_albert,
)


def _electra_small() -> Model:
    spec = bert.build(
        n_vocab=30522,
        d_embedding=128,
        d_model=256,
        n_layers=12,
        n_heads=4,
        d_ff=1024,
        max_positions=512,
        n_types=2,
        masked=False,
        name="electra-small-discriminator",
    )
    replaced = Classifier(d_model=256, n_labels=1, labels="all", transform=Pooler(d_model=256, activation="gelu"))
    return spec.changed(head=replaced)


ROWS["electra-small-discriminator"] = Entry(
    name="electra-small-discriminator",
    family="electra",
    source="Clark et al. 2020, arXiv 2003.10555, Table 6; config of google/electra-small-discriminator",
    dtype="float32",
    make=_electra_small,
)
_make_deberta = partial(
    deberta_v2.build,
    n_vocab=128100,
    n_layers=12,
    name="deberta-v3-base",
    distances=Disentangled(span=256, max_distance=512),
    normed=True,
    absolute=False,
    **_BASE,
)
ROWS["deberta-v3-base"] = Entry(
    name="deberta-v3-base",
    family="deberta-v2",
    source="He et al. 2021, arXiv 2111.09543; config of microsoft/deberta-v3-base",
    dtype="float16",
    make=_make_deberta,
)


def _deberta_v2_xlarge() -> Model:
    return deberta_v2.build(
        n_vocab=128100,
        d_model=1536,
        n_layers=24,
        n_heads=24,
        d_ff=6144,
        max_positions=512,
        n_types=0,
        name="deberta-v2-xlarge",
        distances=Disentangled(span=256, max_distance=512),
        normed=True,
        absolute=False,
        convolution=CentredConvolution(d_model=1536, kernel=3),
    )


ROWS["deberta-v2-xlarge"] = Entry(
    name="deberta-v2-xlarge",
    family="deberta-v2",
    source="He et al. 2020, arXiv 2006.03654; config of microsoft/deberta-v2-xlarge",
    dtype="float16",
    make=_deberta_v2_xlarge,
)
_roberta("all-mpnet-base-v2", "mpnet", MPNET_SOURCE, n_vocab=30527, n_types=0, n_buckets=32, masked=False, pooled=True)


def _nomic_embed() -> Model:
    return nomic_bert.build(
        n_vocab=30528,
        d_model=768,
        n_layers=12,
        n_heads=12,
        d_ff=3072,
        max_positions=8192,
        rotary=Rotary(d_rotary=64, theta=1000.0),
        n_types=2,
        eps=1e-12,
        masked=False,
        name="nomic-embed-text-v1.5",
    )


NOMIC_SOURCE = "Nussbaum et al. 2024, arXiv 2402.01613; config of nomic-ai/nomic-embed-text-v1.5"
ROWS["nomic-embed-text-v1.5"] = Entry(
    name="nomic-embed-text-v1.5", family="nomic_bert", source=NOMIC_SOURCE, dtype="float32", make=_nomic_embed
)


def _modernbert_base() -> Model:
    everything, near = Rotary(d_rotary=64, theta=160_000.0), Rotary(d_rotary=64, theta=10_000.0)
    head = HeadTransform(d_model=768, activation="gelu", eps=1e-5, bias=False, norm_bias=False)
    return modernbert.build(
        n_vocab=50368,
        d_model=768,
        n_layers=22,
        n_heads=12,
        d_ff=1152,
        windows=[65 if i % 3 else None for i in range(22)],
        rotary=everything,
        local=near,
        max_positions=8192,
        eps=1e-5,
        head=head,
        name="modernbert-base",
    )


MODERNBERT_SOURCE = "Warner et al. 2024, arXiv 2412.13663, Table 4; config of answerdotai/ModernBERT-base"
ROWS["modernbert-base"] = Entry(
    name="modernbert-base", family="modernbert", source=MODERNBERT_SOURCE, dtype="float32", make=_modernbert_base
)

OPT_SOURCE = "Zhang et al. 2022, arXiv 2205.01068, Table 1; config of facebook/opt-1.3b"
PALM_SOURCE = "Chowdhery et al. 2022, arXiv 2204.02311, Table 1 and section 2; no weights published"
CHINCHILLA_SOURCE = "Hoffmann et al. 2022, arXiv 2203.15556, Table 4; no weights published"


def _palm(name: str, layers: int, d_model: int, heads: int) -> None:
    make = partial(
        palm.build,
        n_vocab=256000,
        d_model=d_model,
        n_layers=layers,
        n_heads=heads,
        d_head=256,
        d_ff=4 * d_model,
        max_positions=2048,
        name=name,
    )
    ROWS[name] = Entry(name=name, family="palm", source=PALM_SOURCE, dtype=None, make=make)


def _chinchilla_70b() -> Model:
    return chinchilla.build(
        n_vocab=32000,
        d_model=8192,
        n_layers=80,
        n_heads=64,
        d_head=128,
        d_ff=32768,
        max_positions=2048,
        name="chinchilla-70b",
    )


_palm("palm-8b", 32, 4096, 16)
_palm("palm-62b", 64, 8192, 32)
_palm("palm-540b", 118, 18432, 48)
ROWS["chinchilla-70b"] = Entry(
    name="chinchilla-70b", family="chinchilla", source=CHINCHILLA_SOURCE, dtype=None, make=_chinchilla_70b
)
ROWS["opt-1.3b"] = Entry(name="opt-1.3b", family="opt", source=OPT_SOURCE, dtype="float16", make=_opt_1_3b)


def _akin(
    name: str,
    layers: int,
    d_model: int,
    heads: int,
    kv_heads: int,
    d_ff: int,
    source: str,
    dtype: str = "bfloat16",
    *,
    kin: Family,
    vocab: int,
    context: int,
    theta: float = 10000.0,
    d_head: int | None = None,
    d_rotary: int | None = None,
    scaling: Scaling | None = None,
    activation: Activation = "silu",
    tied: bool = False,
    **more: Any,  # noqa: ANN401
) -> None:
    """Adds a row of a family akin to llama; `more` is what its `build` takes beside the sizes."""

    def make() -> Model:
        rotary = Rotary(d_rotary=d_rotary or d_head or d_model // heads, theta=theta, scaling=scaling)
        return kin.build(
            n_vocab=vocab,
            d_model=d_model,
            n_layers=layers,
            n_heads=heads,
            n_kv_heads=kv_heads,
            d_ff=d_ff,
            max_positions=context,
            rotary=rotary,
            activation=activation,
            tied=tied,
            d_head=d_head,
            name=name,
            **more,
        )

    ROWS[name] = Entry(name=name, family=kin.name, source=source, dtype=dtype, make=make)


_qwen2 = partial(_akin, kin=qwen2.FAMILY, eps=1e-6, context=32768, theta=1e6)
QWEN2_SOURCE = "Yang et al. 2024, arXiv 2407.10671; config of Qwen/"
QWEN25_SOURCE = "Yang et al. 2024, arXiv 2412.15115; config of Qwen/"
_qwen2("qwen1.5-7b", 32, 4096, 32, 32, 11008, "config of Qwen/Qwen1.5-7B", vocab=151936)
_qwen2("qwen2-0.5b", 24, 896, 14, 2, 4864, QWEN2_SOURCE + "Qwen2-0.5B", vocab=151936, tied=True)
_qwen2("qwen2.5-7b", 28, 3584, 28, 4, 18944, QWEN25_SOURCE + "Qwen2.5-7B-Instruct", vocab=152064)

QWEN3_SOURCE = "Yang et al. 2025, arXiv 2505.09388; config of Qwen/"
_qwen3 = partial(_akin, kin=qwen3.FAMILY, eps=1e-6, vocab=151936, context=40960, theta=1e6, d_head=128)
_qwen3("qwen3-0.6b", 28, 1024, 16, 8, 3072, QWEN3_SOURCE + "Qwen3-0.6B", tied=True)
_qwen3("qwen3-8b", 36, 4096, 32, 8, 12288, QWEN3_SOURCE + "Qwen3-8B")

MISTRAL_SOURCE = "Jiang et al. 2023, arXiv 2310.06825, Table 1; config of mistralai/Mistral-7B-v0.1"
_akin(
    "mistral-7b-v0.1",
    32,
    4096,
    32,
    8,
    14336,
    MISTRAL_SOURCE,
    kin=mistral.FAMILY,
    window=4096,
    vocab=32000,
    context=32768,
)

OLMO_SOURCE = "Groeneveld et al. 2024, arXiv 2402.00838, Table 1; config of allenai/OLMo-1B-hf"
_akin(
    "olmo-1b",
    16,
    2048,
    16,
    16,
    8192,
    OLMO_SOURCE,
    "float32",
    kin=olmo.FAMILY,
    vocab=50304,
    context=2048,
    tied=True,
)
OLMO2_SOURCE = "Walsh et al. 2025, arXiv 2501.00656; config of allenai/OLMo-2-1124-7B"
_akin(
    "olmo-2-7b",
    32,
    4096,
    32,
    32,
    11008,
    OLMO2_SOURCE,
    "float32",
    kin=olmo2.FAMILY,
    eps=1e-6,
    vocab=100352,
    context=4096,
    theta=500000.0,
)

STARCODER2_SOURCE = "Lozhkov et al. 2024, arXiv 2402.19173, Table 6; config of bigcode/starcoder2-3b"
_akin(
    "starcoder2-3b",
    30,
    3072,
    24,
    2,
    12288,
    STARCODER2_SOURCE,
    "float32",
    kin=starcoder2.FAMILY,
    bias=True,
    window=4096,
    vocab=49152,
    context=16384,
    theta=999999.4420358813,
    activation="gelu_tanh",
    tied=True,
)

COMMAND_R_SOURCE = "Cohere 2024, the model card of Command R; config of CohereForAI/c4ai-command-r-v01"
_akin(
    "command-r-35b",
    40,
    8192,
    64,
    64,
    22528,
    COMMAND_R_SOURCE,
    "float16",
    kin=cohere.FAMILY,
    vocab=256000,
    context=8192,
    theta=8e6,
    tied=True,
)


def _bloom(name: str, layers: int, d_model: int, heads: int, dtype: str, source: str) -> None:
    make = partial(
        bloom.build,
        n_vocab=250880,
        d_model=d_model,
        n_layers=layers,
        n_heads=heads,
        max_positions=2048,
        name=name,
    )
    ROWS[name] = Entry(name=name, family="bloom", source=source, dtype=dtype, make=make)


BLOOM_SOURCE = "BigScience 2022, arXiv 2211.05100, Table 3; config of bigscience/"
_bloom("bloom-560m", 24, 1024, 16, "float16", BLOOM_SOURCE + "bloom-560m")
_bloom("bloom-176b", 70, 14336, 112, "bfloat16", BLOOM_SOURCE + "bloom")

MIXTRAL_SOURCE = "Jiang et al. 2024, arXiv 2401.04088, Table 1; config of mistralai/Mixtral-8x7B-v0.1"
_akin(
    "mixtral-8x7b",
    32,
    4096,
    32,
    8,
    14336,
    MIXTRAL_SOURCE,
    kin=mixtral.FAMILY,
    router=Router(d_model=4096, n_experts=8, top_k=2, renormalise=True),
    vocab=32000,
    context=32768,
    theta=1e6,
)

_akin(
    "qwen3-30b-a3b",
    48,
    2048,
    32,
    4,
    6144,
    QWEN3_SOURCE + "Qwen3-30B-A3B",
    kin=qwen3_moe.FAMILY,
    router=Router(d_model=2048, n_experts=128, top_k=8, renormalise=True),
    d_expert=768,
    eps=1e-6,
    vocab=151936,
    context=40960,
    theta=1e6,
    d_head=128,
)

QWEN3_NEXT_SOURCE = "Qwen Team 2025, the blog post of Qwen3-Next; config of Qwen/Qwen3-Next-80B-A3B-Instruct"
_akin(
    "qwen3-next-80b",
    48,
    2048,
    16,
    2,
    5120,
    QWEN3_NEXT_SOURCE,
    kin=qwen3_next.FAMILY,
    linear=every_but_last(48, 4),
    n_key_heads=16,
    n_value_heads=32,
    d_key=128,
    d_value=128,
    kernel=4,
    router=Router(d_model=2048, n_experts=512, top_k=10, renormalise=True),
    d_expert=512,
    d_shared=512,
    n_predictors=1,
    vocab=151936,
    context=262144,
    theta=1e7,
    d_head=256,
    d_rotary=64,
)

OLMOE_SOURCE = "Muennighoff et al. 2024, arXiv 2409.02060, Table 1; config of allenai/OLMoE-1B-7B-0924"
_ROUTER = Router(d_model=2048, n_experts=64, top_k=8)
_akin("olmoe-1b-7b", 16, 2048, 16, 16, 1024, OLMOE_SOURCE, kin=olmoe.FAMILY, router=_ROUTER, vocab=50304, context=4096)

GLM_SOURCE = "GLM-4.5 Team 2025, arXiv 2508.06471, Table 1; config of zai-org/GLM-4.5-Air"
_akin(
    "glm-4.5-air",
    46,
    4096,
    96,
    8,
    10944,
    GLM_SOURCE,
    kin=glm4_moe.FAMILY,
    router=corrected_router(d_model=4096, n_experts=128, top_k=8),
    d_expert=1408,
    n_shared=1,
    n_dense=1,
    bias=True,
    n_predictors=1,
    vocab=151552,
    context=131072,
    theta=1e6,
    d_head=128,
    d_rotary=64,
)

GPT_OSS_SOURCE = "OpenAI 2025, arXiv 2508.10925, Table 1; config of openai/"
# of linear maps only the experts' are packed
MXFP4 = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
    "quant_method": "mxfp4",
}
for _name, _layers, _experts in (("gpt-oss-20b", 24, 32), ("gpt-oss-120b", 36, 128)):
    _router = Router(d_model=2880, n_experts=_experts, top_k=4, renormalise=True, bias=True)
    _akin(
        _name,
        _layers,
        2880,
        64,
        8,
        2880,
        GPT_OSS_SOURCE + _name,
        kin=gpt_oss.FAMILY,
        router=_router,
        windows=(128, None) * (_layers // 2),
        vocab=201088,
        context=131072,
        theta=150000.0,
        d_head=64,
        scaling=YaRN(factor=32.0, original_context=4096, truncate=False),
    )
    ROWS[_name] = replace(ROWS[_name], quantization=MXFP4)

LLAMA4_SOURCE = "Meta 2025, the Llama 4 model card; text_config of meta-llama/Llama-4-Scout-17B-16E"
_ROPE_LAYERS = every_but_last(48, 4)
_akin(
    "llama-4-scout-text",
    48,
    5120,
    40,
    8,
    8192,
    LLAMA4_SOURCE,
    kin=llama4_text.FAMILY,
    router=Router(d_model=5120, n_experts=16, top_k=1, scoring="sigmoid"),
    rope_layers=_ROPE_LAYERS,
    chunks=[8192 if rope else None for rope in _ROPE_LAYERS],
    sparse=(True,) * 48,
    vocab=202048,
    context=10485760,
    theta=500000.0,
    d_head=128,
    scaling=Llama3Scaling(factor=16.0, low_freq_factor=1.0, high_freq_factor=1.0, original_context=8192),
)


DEEPSEEK_SOURCE = "Dai et al. 2024, arXiv 2401.06066, Table 1; config of deepseek-ai/deepseek-moe-16b-base"
_akin(
    "deepseek-moe-16b",
    28,
    2048,
    16,
    16,
    10944,
    DEEPSEEK_SOURCE,
    kin=deepseek.FAMILY,
    router=Router(d_model=2048, n_experts=64, top_k=6),
    d_expert=1408,
    n_shared=2,
    n_dense=1,
    eps=1e-6,
    vocab=102400,
    context=4096,
)


# What both large ones have: each query of rank 1536, all keys and values of rank 512.
_LATENT: dict[str, Any] = {
    "n_heads": 128,
    "q_rank": 1536,
    "kv_rank": 512,
    "d_nope": 128,
    "d_rope": 64,
    "d_value": 128,
    "rotary": Rotary(
        d_rotary=64, pairing="adjacent", scaling=YaRN(factor=40.0, original_context=4096, attention_factor=1.0)
    ),
    "mscale": 1.0,
    "max_positions": 163840,
    "eps": 1e-6,
}


def _deepseek_v2() -> Model:
    groups = ExpertGroups(n_groups=8, top_groups=3, score="best")
    return latent.build(
        router=Router(d_model=5120, n_experts=160, top_k=6, groups=groups, scale=16.0),
        n_vocab=102400,
        d_model=5120,
        n_layers=60,
        n_dense=1,
        d_ff=12288,
        d_expert=1536,
        n_shared=2,
        name="deepseek-v2",
        **_LATENT,
    )


def _deepseek_v3() -> Model:
    groups = ExpertGroups(n_groups=8, top_groups=4, score="two_best")
    return latent.build(
        router=corrected_router(7168, 256, 8, scale=2.5, groups=groups),
        n_vocab=129280,
        d_model=7168,
        n_layers=61,
        n_dense=3,
        d_ff=18432,
        d_expert=2048,
        n_shared=1,
        n_predictors=1,
        name="deepseek-v3",
        **_LATENT,
    )


def _deepseek_v32() -> Model:
    groups = ExpertGroups(n_groups=8, top_groups=4, score="two_best")
    return indexers.build(
        router=corrected_router(7168, 256, 8, scale=2.5, groups=groups),
        n_vocab=129280,
        d_model=7168,
        n_layers=61,
        n_dense=3,
        d_ff=18432,
        d_expert=2048,
        n_shared=1,
        n_predictors=1,
        index_heads=64,
        index_width=128,
        index_top_k=2048,
        pairing="halves",
        name="deepseek-v3.2",
        **_LATENT,
    )


def _glm_5(name: str, context: int, theta: float, layers: tuple[bool, ...] = ()) -> Model:
    return indexers.build(
        router=corrected_router(6144, 256, 8, scale=2.5),
        n_vocab=154880,
        d_model=6144,
        n_layers=78,
        n_heads=64,
        n_dense=3,
        d_ff=12288,
        d_expert=2048,
        n_shared=1,
        n_predictors=1,
        max_positions=context,
        q_rank=2048,
        kv_rank=512,
        d_nope=192,
        d_rope=64,
        d_value=256,
        rotary=Rotary(d_rotary=64, theta=theta, pairing="adjacent"),
        index_heads=32,
        index_width=128,
        index_top_k=2048,
        index_layers=layers,
        pairing="adjacent",
        name=name,
    )


_SPARSE, _HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"


def _deepseek_v4(name: str, kinds: tuple[str, ...], d_model: int, n_heads: int, **sizes: Any) -> Model:  # noqa: ANN401
    rotary = Rotary(d_rotary=64, pairing="adjacent")
    yarn = YaRN(factor=16.0, original_context=65536, attention_factor=1.0)
    return deepseek_v4.build(
        name=name,
        d_model=d_model,
        n_heads=n_heads,
        n_layers=len(kinds),
        kinds=kinds,
        hashed=tuple(i < 3 for i in range(len(kinds))),
        ratios={_SPARSE: 4, _HEAVY: 128},
        n_vocab=129280,
        d_head=512,
        d_rope=64,
        window=128,
        groups=n_heads // 8,
        o_rank=1024,
        main=rotary,
        compressed=replace(rotary, theta=160000.0, scaling=yarn),
        index_heads=64,
        index_width=128,
        limit=10.0,
        n_streams=4,
        iterations=20,
        stream_eps=1e-6,
        eps=1e-6,
        max_positions=1048576,
        **sizes,
    )


def _v4_kinds(first: str, layers: int) -> tuple[str, ...]:
    later = (_SPARSE, _HEAVY)
    return (first, first, *(later[i % 2] for i in range(layers - 2)))


def _deepseek_v4_flash() -> Model:
    router = corrected_router(4096, 256, 6, scoring="sqrt_softplus", scale=1.5)
    kinds = _v4_kinds("sliding_attention", 43)
    return _deepseek_v4("deepseek-v4-flash", kinds, 4096, 64, d_ff=2048, q_rank=1024, index_top_k=512, router=router)


def _deepseek_v4_pro() -> Model:
    router = corrected_router(7168, 384, 6, scoring="sqrt_softplus", scale=2.5)
    kinds = _v4_kinds(_HEAVY, 61)
    return _deepseek_v4("deepseek-v4-pro", kinds, 7168, 128, d_ff=3072, q_rank=1536, index_top_k=1024, router=router)


_V4_PACKED = {  # with the expert_dtype beside it
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
    "weight_block_size": [128, 128],
}
for _name, _make in (("flash", _deepseek_v4_flash), ("pro", _deepseek_v4_pro)):
    ROWS[f"deepseek-v4-{_name}"] = Entry(
        name=f"deepseek-v4-{_name}",
        family="deepseek_v4",
        source=f"DeepSeek-AI 2026; config of deepseek-ai/DeepSeek-V4-{_name.capitalize()}",
        dtype="bfloat16",
        make=_make,
        quantization=_V4_PACKED,
    )
ROWS["deepseek-v3.2"] = Entry(
    name="deepseek-v3.2",
    family="deepseek_v32",
    source="DeepSeek-AI 2025, arXiv 2512.02556; config of deepseek-ai/DeepSeek-V3.2",
    dtype="bfloat16",
    make=_deepseek_v32,
    quantization={
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
)
ROWS["glm-5"] = Entry(
    name="glm-5",
    family="glm_moe_dsa",
    source="Z.ai, GLM-5; config of zai-org/GLM-5",
    dtype="bfloat16",
    make=lambda: _glm_5("glm-5", 202752, 1e6),
)
ROWS["glm-5.2"] = Entry(
    name="glm-5.2",
    family="glm_moe_dsa",
    source="Z.ai, GLM-5.2; config of zai-org/GLM-5.2",
    dtype="bfloat16",
    make=lambda: _glm_5("glm-5.2", 1048576, 8e6, tuple(i < 3 or i % 4 == 2 for i in range(78))),
)
ROWS["deepseek-v2"] = Entry(
    name="deepseek-v2",
    family="deepseek_v2",
    source="DeepSeek-AI 2024, arXiv 2405.04434, section 3.1.2; config of deepseek-ai/DeepSeek-V2",
    dtype="bfloat16",
    make=_deepseek_v2,
)
ROWS["deepseek-v3"] = Entry(
    name="deepseek-v3",
    family="deepseek_v3",
    source="DeepSeek-AI 2024, arXiv 2412.19437, section 4.2; config of deepseek-ai/DeepSeek-V3",
    dtype="bfloat16",
    make=_deepseek_v3,
    quantization={
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
)


def _mpt_7b() -> Model:
    return mpt.build(n_vocab=50432, d_model=4096, n_layers=32, n_heads=32, max_positions=2048, name="mpt-7b")


MPT_SOURCE = "MosaicML 2023, Introducing MPT-7B; config of mosaicml/mpt-7b"
ROWS["mpt-7b"] = Entry(name="mpt-7b", family="mpt", source=MPT_SOURCE, dtype="bfloat16", make=_mpt_7b)


def _falcon_7b() -> Model:
    return falcon.build(
        n_vocab=65024,
        d_model=4544,
        n_layers=32,
        n_heads=71,
        n_kv_heads=1,
        max_positions=2048,
        rotary=Rotary(d_rotary=64),
        name="falcon-7b",
    )


FALCON_SOURCE = "Almazrouei et al. 2023, arXiv 2311.16867; config of tiiuae/falcon-7b"
ROWS["falcon-7b"] = Entry(name="falcon-7b", family="falcon", source=FALCON_SOURCE, dtype="bfloat16", make=_falcon_7b)


def _gemma(
    name: str,
    d_model: int,
    heads: int,
    kv_heads: int,
    d_head: int,
    d_ff: int,
    source: str,
    *,
    windows: tuple[int | None, ...],
    rotary: Rotary,
    local: Rotary | None = None,
    family: str = "gemma",
    vocab: int = 256000,
    context: int = 8192,
    **more: float | bool,
) -> None:
    """Adds a row with one layer per item of `windows`; layers with a window use the RoPE `local`, if given."""

    def make() -> Model:
        return gemma.build(
            n_vocab=vocab,
            d_model=d_model,
            n_layers=len(windows),
            n_heads=heads,
            n_kv_heads=kv_heads,
            d_head=d_head,
            d_ff=d_ff,
            max_positions=context,
            windows=windows,
            rotary=rotary,
            local=local,
            name=name,
            **more,  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        )

    ROWS[name] = Entry(name=name, family=family, source=source, dtype="bfloat16", make=make)


# d_model, heads, key/value heads, d_head, d_ff
GEMMA_SOURCE = "Gemma Team 2024, arXiv 2403.08295, Table 1; config of google/"
_ROTARY_256 = Rotary(d_rotary=256)
_gemma("gemma-2b", 2048, 8, 1, 256, 16384, GEMMA_SOURCE + "gemma-2b", windows=(None,) * 18, rotary=_ROTARY_256)
_gemma("gemma-7b", 3072, 16, 16, 256, 24576, GEMMA_SOURCE + "gemma-7b", windows=(None,) * 28, rotary=_ROTARY_256)
GEMMA2_SOURCE = "Gemma Team 2024, arXiv 2408.00118, Table 1; config of google/"
_gemma2 = partial(_gemma, family="gemma2", sandwich=True, softcap=50.0, logit_softcap=30.0)
_gemma2(
    "gemma-2-2b", 2304, 8, 4, 256, 9216, GEMMA2_SOURCE + "gemma-2-2b", windows=(4096, None) * 13, rotary=_ROTARY_256
)
_gemma2(
    "gemma-2-27b",
    4608,
    32,
    16,
    128,
    36864,
    GEMMA2_SOURCE + "gemma-2-27b",
    windows=(4096, None) * 23,
    rotary=Rotary(d_rotary=128),
    scale=144**-0.5,
)
GEMMA3_SOURCE = "Gemma Team 2025, arXiv 2503.19786, section 2; config of google/"
_gemma3 = partial(_gemma, family="gemma3_text", sandwich=True, head_norms=True, local=_ROTARY_256)
_gemma3(
    "gemma-3-1b",
    1152,
    4,
    1,
    256,
    6912,
    GEMMA3_SOURCE + "gemma-3-1b-it",
    vocab=262144,
    context=32768,
    windows=(*((512,) * 5 + (None,)) * 4, 512, 512),
    rotary=Rotary(d_rotary=256, theta=1e6),
)
_gemma3(
    "gemma-3-4b",
    2560,
    8,
    4,
    256,
    10240,
    GEMMA3_SOURCE + "gemma-3-4b-it (its text part)",
    vocab=262208,
    context=131072,
    windows=(*((1024,) * 5 + (None,)) * 5, *(1024,) * 4),
    rotary=Rotary(d_rotary=256, theta=1e6, scaling=LinearScaling(factor=8.0)),
)


def _phi_2() -> Model:
    return phi.build(
        n_vocab=51200,
        d_model=2560,
        n_layers=32,
        n_heads=32,
        d_ff=10240,
        max_positions=2048,
        d_head=80,
        rotary=Rotary(d_rotary=32),
        name="phi-2",
    )


PHI2_SOURCE = "Microsoft 2023, Phi-2: the surprising power of small language models; config of microsoft/phi-2"
ROWS["phi-2"] = Entry(name="phi-2", family="phi", source=PHI2_SOURCE, dtype="float16", make=_phi_2)


def _phi_3_mini() -> Model:
    return phi3.FAMILY.build(
        n_vocab=32064,
        d_model=3072,
        n_layers=32,
        n_heads=32,
        n_kv_heads=32,
        d_ff=8192,
        max_positions=4096,
        rotary=Rotary(d_rotary=96),
        window=2047,
        name="phi-3-mini",
    )


PHI3_SOURCE = "Abdin et al. 2024, arXiv 2404.14219, section 2; config of microsoft/Phi-3-mini-4k-instruct"
ROWS["phi-3-mini"] = Entry(name="phi-3-mini", family="phi3", source=PHI3_SOURCE, dtype="bfloat16", make=_phi_3_mini)


def _t5(
    name: str,
    layers: int,
    d_model: int,
    heads: int,
    d_head: int,
    d_ff: int,
    source: str,
    *,
    family: str = "t5",
    vocab: int = 32128,
    gated: bool = False,
) -> None:
    """Adds a row with as many layers in the decoder as in the encoder; version 1.1 is gated and has its own head."""
    make = partial(
        t5.build,
        n_vocab=vocab,
        d_model=d_model,
        n_heads=heads,
        d_head=d_head,
        d_ff=d_ff,
        max_positions=512,
        n_layers=layers,
        n_decoder_layers=layers,
        gated=gated,
        tied=not gated,
        scaled=not gated,
        activation="gelu_tanh" if gated else "relu",
        name=name,
    )
    ROWS[name] = Entry(name=name, family=family, source=source, dtype="float32", make=make)


# layers of each stack, d_model, heads, d_head, d_ff
T5_SOURCE = "Raffel et al. 2020, arXiv 1910.10683, section 3.7; config of google-t5/"
_t5("t5-small", 6, 512, 8, 64, 2048, T5_SOURCE + "t5-small")
_t5("t5-base", 12, 768, 12, 64, 3072, T5_SOURCE + "t5-base")
_t5("t5-large", 24, 1024, 16, 64, 4096, T5_SOURCE + "t5-large")
_t5("t5-3b", 24, 1024, 32, 128, 16384, T5_SOURCE + "t5-3b")
_t5("t5-11b", 24, 1024, 128, 128, 65536, T5_SOURCE + "t5-11b")
FLAN_SOURCE = "Chung et al. 2022, arXiv 2210.11416, Table 2; config of google/"
_t5("flan-t5-base", 12, 768, 12, 64, 2048, FLAN_SOURCE + "flan-t5-base", gated=True)
MT5_SOURCE = "Xue et al. 2021, arXiv 2010.11934, Table 1; config of google/mt5-small"
_t5("mt5-small", 8, 512, 6, 64, 1024, MT5_SOURCE, family="mt5", vocab=250112, gated=True)


def _switch_base_8() -> Model:
    """Every second layer of either stack has experts."""
    sparse = [switch_transformers.is_sparse(layer, 2) for layer in range(12)]
    return switch_transformers.build(
        n_vocab=32128,
        d_model=768,
        n_layers=12,
        n_heads=12,
        d_head=64,
        d_ff=3072,
        max_positions=512,
        n_experts=8,
        capacity=64,
        sparse=(sparse, sparse),
        name="switch-base-8",
    )


SWITCH_SOURCE = "Fedus et al. 2021, arXiv 2101.03961, Table 9; config of google/switch-base-8"
ROWS["switch-base-8"] = Entry(
    name="switch-base-8", family="switch_transformers", source=SWITCH_SOURCE, dtype="float32", make=_switch_base_8
)


def _bart(
    name: str,
    kin: Family,
    layers: int,
    d_model: int,
    heads: int,
    source: str,
    *,
    vocab: int,
    activation: Activation,
    scaled: bool,
) -> None:
    """Adds a row whose stacks are alike, their feed-forwards four times as wide as the stream."""

    def make() -> Model:
        stack = bart.Stack(n_layers=layers, n_heads=heads, d_ff=4 * d_model)
        return kin.build(
            n_vocab=vocab,
            d_model=d_model,
            encoder=stack,
            decoder=stack,
            max_positions=1024,
            activation=activation,
            scaled=scaled,
            name=name,
        )

    ROWS[name] = Entry(name=name, family=kin.name, source=source, dtype="float32", make=make)


# layers of each stack, d_model, heads
TRANSFORMER_SOURCE = "Vaswani et al. 2017, arXiv 1706.03762, Table 3 and section 5.1; as a Marian model"
_transformer = partial(_bart, kin=marian.FAMILY, source=TRANSFORMER_SOURCE, vocab=37000, activation="relu", scaled=True)
_transformer("transformer-base", layers=6, d_model=512, heads=8)
_transformer("transformer-big", layers=6, d_model=1024, heads=16)
BART_SOURCE = "Lewis et al. 2020, arXiv 1910.13461; config of facebook/"
_bart("bart-base", bart.FAMILY, 6, 768, 12, BART_SOURCE + "bart-base", vocab=50265, activation="gelu", scaled=False)
_bart("bart-large", bart.FAMILY, 12, 1024, 16, BART_SOURCE + "bart-large", vocab=50265, activation="gelu", scaled=False)


ROWS["rwkv-4-169m"] = Entry(
    name="rwkv-4-169m",
    family="rwkv",
    source="Peng et al. 2023, arXiv 2305.13048, Table 2; config of RWKV/rwkv-4-169m-pile",
    dtype="float32",
    make=lambda: rwkv.build(
        n_vocab=50277, d_model=768, n_layers=12, max_positions=1024, eps=1e-5, d_ff=3072, name="rwkv-4-169m"
    ),
)
ROWS["transfo-xl-wt103"] = Entry(
    name="transfo-xl-wt103",
    family="transfo-xl",
    source="Dai et al. 2019, arXiv 1901.02860, section 4.1; config of transfo-xl/transfo-xl-wt103",
    dtype="float32",
    make=lambda: transfo_xl.build(
        n_vocab=267735,
        cutoffs=(20000, 40000, 200000),
        d_model=1024,
        d_embedding=1024,
        divisor=4,
        n_layers=18,
        n_heads=16,
        d_head=64,
        d_ff=4096,
        window=1600,
        max_distance=1000,
        name="transfo-xl-wt103",
    ),
)


def _rwkv7(name: str, layers: int, d_model: int, decay: int, move: int, gate: int) -> None:
    # contexts as the weights' names on the hub have them, -ctx4096
    sizes = {"n_vocab": 65536, "d_model": d_model, "n_layers": layers, "d_ff": 4 * d_model, "max_positions": 4096}
    ranks = {"decay_rank": decay, "rate_rank": decay, "move_rank": move, "gate_rank": gate}
    source = "Peng et al. 2025, arXiv 2503.14456; widths and ranks of fla-hub's rwkv7-*-world"
    make = lambda: rwkv7.build(**sizes, **ranks, name=name)  # noqa: E731  # type: ignore[arg-type]
    ROWS[name] = Entry(name=name, family="rwkv7", source=source, dtype="bfloat16", make=make)


_rwkv7("rwkv7-0.1b-world", layers=12, d_model=768, decay=64, move=32, gate=128)
_rwkv7("rwkv7-0.4b-world", layers=24, d_model=1024, decay=64, move=32, gate=128)
_rwkv7("rwkv7-1.5b-world", layers=24, d_model=2048, decay=96, move=64, gate=256)
_rwkv7("rwkv7-2.9b-world", layers=32, d_model=2560, decay=96, move=64, gate=320)
ROWS["xlstm-7b"] = Entry(
    name="xlstm-7b",
    family="xlstm",
    source="Beck et al. 2025, arXiv 2503.13427; config of NX-AI/xLSTM-7b",
    dtype="float32",
    make=lambda: xlstm.build(
        n_vocab=50304,
        d_model=4096,
        n_layers=32,
        n_heads=8,
        d_keys=2048,
        d_values=4096,
        d_ff=10944,
        eps=1e-6,
        cell_eps=1e-6,
        cap=15.0,
        logit_softcap=30.0,
        name="xlstm-7b",
    ),
)
ROWS["recurrentgemma-2b"] = Entry(
    name="recurrentgemma-2b",
    family="recurrent_gemma",
    source="Botev et al. 2024, arXiv 2404.07839, Table 1; config of google/recurrentgemma-2b",
    dtype="float32",
    make=lambda: recurrent_gemma.build(
        recurrent=[i % 3 != 2 for i in range(26)],
        d_rnn=2560,
        kernel=4,
        window=2048,
        logit_softcap=30.0,
        n_vocab=256000,
        d_model=2560,
        n_layers=26,
        n_heads=10,
        n_kv_heads=1,
        d_head=256,
        d_ff=15360,
        max_positions=8192,
        rotary=Rotary(d_rotary=128),
        activation="gelu_tanh",
        tied=True,
        name="recurrentgemma-2b",
    ),
)
ROWS["zamba2-7b"] = Entry(
    name="zamba2-7b",
    family="zamba2",
    source="Glorioso et al. 2024, arXiv 2411.15242; config of Zyphra/Zamba2-7B",
    dtype="bfloat16",
    make=lambda: zamba2.build(
        attends=tuple(i == 6 or (i > 6 and i % 6 == 5) for i in range(81)),
        n_shared=2,
        rank=128,
        adapts_attention=False,
        rotary=Rotary(d_rotary=224),
        bias=False,
        eps=1e-5,
        ssm_heads=112,
        ssm_head=64,
        d_state=64,
        n_groups=2,
        kernel=4,
        n_vocab=32000,
        d_model=3584,
        n_layers=81,
        n_heads=32,
        d_head=224,
        d_ff=14336,
        max_positions=4096,
        activation="gelu",
        tied=True,
        name="zamba2-7b",
    ),
)
WHISPER_SOURCE = "Radford et al. 2022, arXiv 2212.04356, Table 1; config of openai/"


def _whisper(name: str, layers: int, d_model: int, heads: int, n_mels: int, vocab: int) -> None:
    """Adds a row whose stacks are alike."""

    def make() -> Model:
        stack = bart.Stack(n_layers=layers, n_heads=heads, d_ff=4 * d_model)
        return whisper.build(
            n_vocab=vocab,
            d_model=d_model,
            encoder=stack,
            decoder=stack,
            n_mels=n_mels,
            n_source=1500,
            max_positions=448,
            activation="gelu",
            name=name,
        )

    ROWS[name] = Entry(name=name, family="whisper", source=WHISPER_SOURCE + name, dtype="float32", make=make)


_whisper("whisper-tiny", 4, 384, 6, 80, 51865)
_whisper("whisper-large-v3", 32, 1280, 20, 128, 51866)


def _voxtral_mini() -> Model:
    text = llama.build(
        n_vocab=131072,
        d_model=3072,
        n_layers=30,
        n_heads=32,
        n_kv_heads=8,
        d_head=128,
        d_ff=8192,
        max_positions=131072,
        rotary=Rotary(d_rotary=128, theta=1e8),
        name="voxtral-mini-3b",
    )
    sounds = {"d_model": 1280, "n_layers": 32, "n_heads": 20, "d_ff": 5120, "n_mels": 128, "n_source": 1500}
    return voxtral.build(text, sounds | {"activation": "gelu"}, placeholder=24, activation="gelu")


def _lfm2_5_vl() -> Model:
    text = lfm2.build(
        conv_layers=tuple(i not in (2, 5, 8, 10, 12, 14) for i in range(16)),
        kernel=3,
        n_vocab=65536,
        d_model=2048,
        n_layers=16,
        n_heads=32,
        n_kv_heads=8,
        d_ff=8192,
        max_positions=128000,
        rotary=Rotary(d_rotary=64, theta=1e6),
        tied=True,
        name="lfm2.5-vl-1.6b",
    )
    images = {"d_model": 1152, "n_layers": 27, "n_heads": 16, "d_ff": 4304, "activation": "gelu_tanh", "eps": 1e-6}
    images |= {"channels": 3, "patch_size": 16, "side": 16}
    more = {"merge": 2, "hidden": 2048, "activation": "gelu", "bias": True, "normed": False}
    return lfm2_vl.build(text, images, placeholder=396, **more)


def _llama_vision() -> Model:
    scaling = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)
    text = mllama.build_text(
        crossing=tuple(range(3, 100, 5)),
        eps=1e-5,
        n_vocab=128256,
        d_model=8192,
        n_layers=100,
        n_heads=64,
        n_kv_heads=8,
        d_ff=28672,
        max_positions=131072,
        rotary=Rotary(d_rotary=128, theta=5e5, scaling=scaling),
        name="llama-3.2-90b-vision",
    )
    images: dict[str, Any] = {"image_size": 560, "patch_size": 14, "channels": 3, "d_model": 1280, "n_heads": 16}
    images |= {"n_layers": 32, "n_global": 8, "d_ff": 5120, "eps": 1e-5, "activation": "gelu", "n_tiles": 4}
    tilings = ((1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1), (4, 1))
    return mllama.build(text, images | {"tilings": tilings, "taps": (3, 7, 15, 23, 30)}, placeholder=128256)


_MLLAMA_SAID = "Dubey et al. 2024, arXiv 2407.21783, section 7; config of meta-llama/Llama-3.2-90B-Vision-Instruct"
_VOXTRAL_SAID = "Liu et al. 2025, arXiv 2507.13264; config of mistralai/Voxtral-Mini-3B-2507"
_LFM2_VL_SAID = "Liquid AI 2025, arXiv 2511.23404; config of LiquidAI/LFM2.5-VL-1.6B"
for _name, _family, _make, _said in (
    ("voxtral-mini-3b", "voxtral", _voxtral_mini, _VOXTRAL_SAID),
    ("llama-3.2-90b-vision", "mllama", _llama_vision, _MLLAMA_SAID),
    ("lfm2.5-vl-1.6b", "lfm2_vl", _lfm2_5_vl, _LFM2_VL_SAID),
):
    ROWS[_name] = Entry(name=_name, family=_family, source=_said, dtype="bfloat16", make=_make)


def _vit_base() -> Model:
    head = Classifier(d_model=768, n_labels=1000)
    return tower(
        image_size=224,
        patch_size=16,
        patch_bias=True,
        d_model=768,
        n_layers=12,
        n_heads=12,
        d_ff=3072,
        eps=1e-12,
        activation="gelu",
        head=head,
        name="vit-base-patch16-224",
    )


VIT_SOURCE = "Dosovitskiy et al. 2020, arXiv 2010.11929, Table 1; config of google/vit-base-patch16-224"
ROWS["vit-base-patch16-224"] = Entry(
    name="vit-base-patch16-224", family="vit", source=VIT_SOURCE, dtype="float32", make=_vit_base
)


def _clip_b32() -> Model:
    text: dict[str, Any] = {"n_vocab": 49408, "max_positions": 77, "d_model": 512, "n_heads": 8, "d_ff": 2048}
    images: dict[str, Any] = {"image_size": 224, "patch_size": 32, "d_model": 768, "n_heads": 12, "d_ff": 3072}
    both: dict[str, Any] = {"n_layers": 12, "eps": 1e-5, "activation": "quick_gelu"}
    return clip.build(text | both, images | both, d_shared=512, name="clip-vit-base-patch32")


CLIP_SOURCE = "Radford et al. 2021, arXiv 2103.00020, Table 20; config of openai/clip-vit-base-patch32"
ROWS["clip-vit-base-patch32"] = Entry(
    name="clip-vit-base-patch32", family="clip", source=CLIP_SOURCE, dtype="float32", make=_clip_b32
)


def _siglip_so400m() -> Model:
    both: dict[str, Any] = {"d_model": 1152, "n_heads": 16, "d_ff": 4304, "n_layers": 27, "eps": 1e-6}
    both |= {"activation": "gelu_tanh"}
    text, images = {"n_vocab": 32000, "max_positions": 64}, {"image_size": 384, "patch_size": 14}
    return siglip.build(text | both, images | both, name="siglip-so400m-patch14-384")


SIGLIP_SOURCE = "Alabdulmohsin et al. 2023, arXiv 2305.13035; config of google/siglip-so400m-patch14-384"
ROWS["siglip-so400m-patch14-384"] = Entry(
    name="siglip-so400m-patch14-384", family="siglip", source=SIGLIP_SOURCE, dtype="float32", make=_siglip_so400m
)


def _dinov2_base() -> Model:
    return dinov2.build(
        gated=False,
        masked=True,
        image_size=518,
        patch_size=14,
        d_model=768,
        n_layers=12,
        n_heads=12,
        d_ff=3072,
        eps=1e-6,
        activation="gelu",
        name="dinov2-base",
    )


DINOV2_SOURCE = "Oquab et al. 2023, arXiv 2304.07193; config of facebook/dinov2-base"
ROWS["dinov2-base"] = Entry(
    name="dinov2-base", family="dinov2", source=DINOV2_SOURCE, dtype="float32", make=_dinov2_base
)


def _dinov3(name: str, **sizes: Any) -> Model:  # noqa: ANN401
    biases = {"bias": True, "value_bias": True, "key_bias": False, "output_bias": True, "mlp_bias": True}
    images = {"image_size": 224, "patch_size": 16, "n_registers": 4, "theta": 100.0}
    return dinov3_vit.build(**images, **biases, **sizes, eps=1e-5, name=name)


DINOV3_SOURCE = "Simeoni et al. 2025, arXiv 2508.10104; config of facebook/"
ROWS["dinov3-vits16"] = Entry(
    name="dinov3-vits16",
    family="dinov3_vit",
    source=f"{DINOV3_SOURCE}dinov3-vits16-pretrain-lvd1689m",
    dtype="float32",
    make=lambda: _dinov3(
        "dinov3-vits16", d_model=384, n_layers=12, n_heads=6, d_ff=1536, gated=False, activation="gelu"
    ),
)
ROWS["dinov3-vith16plus"] = Entry(
    name="dinov3-vith16plus",
    family="dinov3_vit",
    source=f"{DINOV3_SOURCE}dinov3-vith16plus-pretrain-lvd1689m",
    dtype="float32",
    make=lambda: _dinov3(
        "dinov3-vith16plus", d_model=1280, n_layers=32, n_heads=20, d_ff=5120, gated=True, activation="silu"
    ),
)


def _llava_7b() -> Model:
    images: dict[str, Any] = {
        "image_size": 336,
        "patch_size": 14,
        "d_model": 1024,
        "n_layers": 24,
        "n_heads": 16,
        "d_ff": 4096,
        "eps": 1e-5,
        "activation": "quick_gelu",
    }
    text = llama.build(
        n_vocab=32064,
        d_model=4096,
        n_layers=32,
        n_heads=32,
        d_ff=11008,
        max_positions=4096,
        rotary=Rotary(d_rotary=128),
        name="llava-1.5-7b",
    )
    return llava.build(text, images, placeholder=32000, layers=23)


LLAVA_SOURCE = "Liu et al. 2023, arXiv 2310.03744; config of llava-hf/llava-1.5-7b-hf"
ROWS["llava-1.5-7b"] = Entry(name="llava-1.5-7b", family="llava", source=LLAVA_SOURCE, dtype="float16", make=_llava_7b)


def _gemma_3_4b_mm() -> Model:
    text = gemma.build(
        n_vocab=262208,
        d_model=2560,
        n_layers=34,
        n_heads=8,
        n_kv_heads=4,
        d_head=256,
        d_ff=10240,
        max_positions=163840,
        windows=((1024,) * 5 + (None,)) * 5 + (1024,) * 4,
        rotary=Rotary(d_rotary=256, scaling=LinearScaling(factor=8.0)),
        local=_ROTARY_256,
        activation="gelu",
        sandwich=True,
        head_norms=True,
        name="gemma-3-4b-mm",
    )
    images: dict[str, Any] = {
        "image_size": 896,
        "patch_size": 14,
        "d_model": 1152,
        "n_layers": 27,
        "n_heads": 16,
        "d_ff": 4304,
        "eps": 1e-6,
        "activation": "gelu_tanh",
    }
    return gemma3.build(text, images, placeholder=262144)


# the numbers of a training framework's conversion: its activation and its rotary base are not google's own
GEMMA3_MM_SOURCE = "Gemma Team 2025, arXiv 2503.19786; config of AI-Hypercomputer/maxtext's conversion of gemma-3-4b"
ROWS["gemma-3-4b-mm"] = Entry(
    name="gemma-3-4b-mm", family="gemma3", source=GEMMA3_MM_SOURCE, dtype="bfloat16", make=_gemma_3_4b_mm
)


def _paligemma_3b() -> Model:
    text = gemma.build(
        n_vocab=257216,
        d_model=2048,
        n_layers=18,
        n_heads=8,
        n_kv_heads=1,
        d_head=256,
        d_ff=16384,
        max_positions=8192,
        rotary=Rotary(d_rotary=256),
        activation="gelu_tanh",
        tied=True,
        name="paligemma-3b-pt-224",
    )
    images: dict[str, Any] = {
        "image_size": 224,
        "patch_size": 14,
        "d_model": 1152,
        "n_layers": 27,
        "n_heads": 16,
        "d_ff": 4304,
        "eps": 1e-6,
        "activation": "gelu_tanh",
    }
    return paligemma.build(text, images, placeholder=257152)


ROWS["paligemma-3b-pt-224"] = Entry(
    name="paligemma-3b-pt-224",
    family="paligemma",
    source="Beyer et al. 2024, arXiv 2407.07726; config of google/paligemma-3b-pt-224",
    dtype="float32",
    make=_paligemma_3b,
)


def _llama_4_scout() -> Model:
    images: dict[str, Any] = {
        "image_size": 336,
        "patch_size": 14,
        "d_model": 1408,
        "n_layers": 34,
        "n_heads": 16,
        "d_ff": 5632,
        "eps": 1e-5,
        "activation": "gelu",
    }
    text = replace(ROWS["llama-4-scout-text"].spec(), name="llama-4-scout")
    assert isinstance(text, LanguageModel)
    return llama4.build(text, images, placeholder=200092)


ROWS["llama-4-scout"] = Entry(
    name="llama-4-scout",
    family="llama4",
    dtype="bfloat16",
    make=_llama_4_scout,
    source=LLAMA4_SOURCE.replace("text_config", "config"),
)


# What the towers of the Qwen-VL models share.
QWEN_TOWER: dict[str, Any] = {"n_heads": 16, "channels": 3, "frames": 2, "merge": 2, "theta": 10000.0}


def _qwen2_5_vl_7b() -> Model:
    text = llama.build(
        n_vocab=152064,
        d_model=3584,
        n_layers=28,
        n_heads=28,
        n_kv_heads=4,
        d_ff=18944,
        max_positions=128000,
        rotary=Rotary(d_rotary=128, theta=1e6, axes=Sections(pairs=(16, 24, 24))),
        eps=1e-6,
        bias=True,
        output_bias=False,
        name="qwen2.5-vl-7b",
    )
    sizes = {"d_model": 1280, "n_layers": 32, "d_ff": 3420, "activation": "silu", "patch_size": 14}
    windows: dict[str, Any] = {"window": 8, "whole": (7, 15, 23, 31)}
    return qwen2_5_vl.build(text, QWEN_TOWER | sizes | windows, 151655)


def _qwen3_vl_2b() -> Model:
    text = llama.build(
        n_vocab=151936,
        d_model=2048,
        n_layers=28,
        n_heads=16,
        n_kv_heads=8,
        d_head=128,
        d_ff=6144,
        max_positions=262144,
        rotary=Rotary(d_rotary=128, theta=5e6, axes=Sections(pairs=(24, 20, 20), interleaved=True)),
        eps=1e-6,
        head_norms=True,
        tied=True,
        name="qwen3-vl-2b",
    )
    sizes = {"d_model": 1024, "n_layers": 24, "d_ff": 4096, "activation": "gelu_tanh", "patch_size": 16}
    return qwen3_vl.build(text, QWEN_TOWER | sizes | {"side": 48, "taps": (5, 11, 17)}, 151655)


for _name, _family, _make, _said in (
    ("qwen2.5-vl-7b", "qwen2_5_vl", _qwen2_5_vl_7b, "arXiv 2502.13923; config of Qwen/Qwen2.5-VL-7B-Instruct"),
    ("qwen3-vl-2b", "qwen3_vl", _qwen3_vl_2b, "arXiv 2511.21631; config of Qwen/Qwen3-VL-2B-Instruct"),
):
    ROWS[_name] = Entry(name=_name, family=_family, source=f"Bai et al. 2025, {_said}", dtype="bfloat16", make=_make)


def _kimi_k25() -> Model:
    text = latent.build(
        router=corrected_router(7168, 384, 8, scale=2.827),
        n_vocab=163840,
        d_model=7168,
        n_layers=61,
        n_dense=1,
        d_ff=18432,
        d_expert=2048,
        n_shared=1,
        name="kimi-k2.5",
        **_LATENT
        | {
            "n_heads": 64,
            "rotary": Rotary(
                d_rotary=64,
                theta=50000.0,
                pairing="adjacent",
                scaling=YaRN(factor=64.0, original_context=4096, attention_factor=1.0),
            ),
            "max_positions": 262144,
            "eps": 1e-5,
        },
    )
    images = {"d_model": 1152, "n_layers": 27, "n_heads": 16, "d_ff": 4304, "activation": "gelu_tanh"}
    images |= {"patch_size": 14, "side": 64, "merge": 2, "theta": 10000.0}
    return kimi_k25.build(text, images, placeholder=163605, eps=1e-5)


def _devstral_small_2() -> Model:
    text = llama.build(
        n_vocab=131072,
        d_model=5120,
        n_layers=40,
        n_heads=32,
        n_kv_heads=8,
        d_head=128,
        d_ff=32768,
        max_positions=393216,
        rotary=Rotary(d_rotary=128, theta=1e8, scaling=YaRN(factor=48.0, original_context=8192, attention_factor=1.0)),
        temperature=QueryTemperature(scale=0.1, floor=8192, from_zero=True),
        name="devstral-small-2-24b",
    )
    images = {"d_model": 1024, "n_layers": 24, "n_heads": 16, "d_ff": 4096, "activation": "silu"}
    images |= {"patch_size": 14, "channels": 3, "theta": 10000.0}
    return mistral3.build(text, images, placeholder=10, merge=2, activation="gelu", bias=False)


for _name, _family, _make, _said in (
    ("kimi-k2.5", "kimi_k25", _kimi_k25, "Kimi Team 2025, arXiv 2507.20534; config of nvidia/Kimi-K2.5-NVFP4"),
    (
        "devstral-small-2-24b",
        "mistral3",
        _devstral_small_2,
        "Mistral AI 2025, the model card; config of mistralai/Devstral-Small-2-24B-Instruct-2512",
    ),
):
    ROWS[_name] = Entry(name=_name, family=_family, source=_said, dtype="bfloat16", make=_make)


_THREE_OF_FOUR = tuple(4096 if window else None for window in every_but_last(64, 4))
_akin(
    "olmo-3.1-32b",
    64,
    5120,
    40,
    8,
    27648,
    "Olmo Team 2025; config of allenai/Olmo-3.1-32B-Instruct",
    kin=olmo3.FAMILY,
    vocab=100278,
    context=65536,
    theta=5e5,
    scaling=YaRN(factor=8.0, original_context=8192, attention_factor=1.2079441541679836),
    local=Rotary(d_rotary=128, theta=5e5),
    windows=_THREE_OF_FOUR,
    eps=1e-6,
)
_akin(
    "exaone-4.0-32b",
    64,
    5120,
    40,
    8,
    27392,
    "LG AI Research 2025, arXiv 2507.11407; config of LGAI-EXAONE/EXAONE-4.0-32B",
    kin=exaone4.FAMILY,
    vocab=102400,
    context=131072,
    theta=1e6,
    scaling=Llama3Scaling(factor=16.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192),
    windows=_THREE_OF_FOUR,
    rope_layers=every_but_last(64, 4),
)
_akin(
    "minimax-m2.7",
    62,
    3072,
    48,
    8,
    1536,
    "MiniMax 2026; config of MiniMaxAI/MiniMax-M2.7",
    kin=minimax_m2.FAMILY,
    router=corrected_router(d_model=3072, n_experts=256, top_k=8, eps=0.0),
    vocab=200064,
    context=204800,
    theta=5e6,
    d_head=128,
    d_rotary=64,
    eps=1e-6,
)
_akin(
    "mimo-v2-flash",
    48,
    4096,
    64,
    4,
    16384,
    "Xiaomi LLM-Core 2026, arXiv 2601.02780; config of XiaomiMiMo/MiMo-V2-Flash",
    kin=mimo_v2_flash.FAMILY,
    router=corrected_router(d_model=4096, n_experts=256, top_k=8),
    d_expert=2048,
    dense=frozenset({0}),
    windows=tuple(129 if i and window else None for i, window in enumerate(every_but_last(48, 6))),
    local=Rotary(d_rotary=64),
    d_value=128,
    value_scale=0.707,
    vocab=152576,
    context=262144,
    theta=5e6,
    d_head=192,
    d_rotary=64,
)
_BY_TILE = {"activation_scheme": "dynamic", "quant_method": "fp8", "weight_block_size": [128, 128]}
for _name, _said in (
    (
        "minimax-m2.7",
        {"fmt": "float8_e4m3fn", "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]},
    ),
    ("mimo-v2-flash", {"fmt": "e4m3"}),
):
    ROWS[_name] = replace(ROWS[_name], quantization=_BY_TILE | _said)


def _mamba(name: str, family: str, source: str, dtype: str | None, **sizes: Any) -> None:  # noqa: ANN401
    """Adds a row of Mamba alone in every layer, 16 numbers in each channel's state."""
    usual = {"d_state": 16, "kernel": 4, "conv_bias": True, "bias": False, "eps": 1e-5, "tied": True, "name": name}
    make = partial(mamba.build, **(usual | sizes))
    ROWS[name] = Entry(name=name, family=family, source=source, dtype=dtype, make=make)


_mamba(
    "mamba-130m",
    "mamba",
    "Gu & Dao 2023, arXiv 2312.00752, Table 11; config of state-spaces/mamba-130m-hf",
    None,
    n_layers=24,
    n_vocab=50280,
    d_model=768,
    d_inner=1536,
    dt_rank=48,
)
_mamba(
    "falcon-mamba-7b",
    "falcon_mamba",
    "Zuo et al. 2024, arXiv 2410.05355; config of tiiuae/falcon-mamba-7b",
    "bfloat16",
    n_layers=64,
    n_vocab=65024,
    d_model=4096,
    d_inner=8192,
    dt_rank=256,
    tied=False,
    norm_eps=1e-6,
)


def _mamba2_3b() -> Model:
    sizes = {"n_vocab": 50288, "d_model": 2560, "n_layers": 64, "n_heads": 80, "d_head": 64, "d_state": 128}
    more = {"n_groups": 1, "kernel": 4, "conv_bias": True, "bias": False, "eps": 1e-5, "tied": True, "expand": 2}
    return mamba2.build(**sizes, **more, dt_min=0.0, dt_max=None, name="mamba2-2.7b")


ROWS["mamba2-2.7b"] = Entry(
    name="mamba2-2.7b",
    family="mamba2",
    source="Dao & Gu 2024, arXiv 2405.21060; README of state-spaces/mamba",
    dtype=None,
    make=_mamba2_3b,
)


def _nemotron_h(name: str, layers: str, d_model: int, source: str, **sizes: Any) -> None:  # noqa: ANN401
    """Adds a row of blocks of one branch each, one letter for each."""
    words = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
    usual: dict[str, Any] = {
        "n_vocab": 131072,
        "max_positions": 262144,
        "eps": 1e-5,
        "mlp_bias": False,
        "activation": "relu2",
        "ssm_head": 64,
        "d_state": 128,
        "n_groups": 8,
        "kernel": 4,
        "conv_bias": True,
        "bias": False,
        "dt_min": 0.0,
        "dt_max": None,
        "n_kv_heads": 2,
        "d_head": 128,
        "d_latent": None,
    }
    kinds = tuple(words[letter] for letter in layers)
    make = partial(nemotron_h.build, layers=kinds, d_model=d_model, name=name, **(usual | sizes))
    ROWS[name] = Entry(name=name, family="nemotron_h", source=source, dtype="bfloat16", make=make)


_nemotron_h(
    "nemotron-h-56b",
    "M-M-M-M*-" + "M-M-M-M-M*-" * 9 + "M-M-M-M-M-",
    8192,
    "NVIDIA 2025, arXiv 2504.03624; config of nvidia/Nemotron-H-56B-Base-8K",
    ssm_heads=256,
    d_state=256,
    n_heads=64,
    n_kv_heads=8,
    d_ff=32768,
    max_positions=8192,
)
_nemotron_h(
    "nemotron-3-nano-30b",
    "MEMEM*E" + "MEMEM*E" * 4 + "MEMEMEM*E" + "MEMEMEME",
    2688,
    "NVIDIA 2025, arXiv 2512.20848; config of nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    ssm_heads=64,
    n_heads=32,
    d_expert=1856,
    d_shared=3712,
    router=corrected_router(d_model=2688, n_experts=128, top_k=6, scale=2.5),
)
_nemotron_h(
    "nemotron-3-super-120b",
    "MEMEMEM*E" + "MEMEMEM*E" * 2 + "MEMEMEMEM*E" * 4 + "MEMEMEM*E" + "MEMEMEME",
    4096,
    "NVIDIA 2026; config of nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4",
    ssm_heads=128,
    n_heads=32,
    d_expert=2688,
    d_shared=5376,
    d_latent=1024,
    router=corrected_router(d_model=4096, n_experts=512, top_k=22, scale=5.0),
)


def _jamba() -> Model:
    sizes = {"n_vocab": 65536, "d_model": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "d_head": 128}
    mixer = {"d_state": 16, "dt_rank": 256, "kernel": 4, "conv_bias": True, "ssm_bias": False, "expand": 2}
    return jamba.build(
        **sizes,
        **mixer,
        attends=tuple(i % 8 == 4 for i in range(32)),
        sparse=tuple(i % 2 == 1 for i in range(32)),
        router=Router(d_model=4096, n_experts=16, top_k=2),
        d_ff=14336,
        eps=1e-6,
        max_positions=262144,
        name="jamba-v0.1",
    )


ROWS["jamba-v0.1"] = Entry(
    name="jamba-v0.1",
    family="jamba",
    source="Lieber et al. 2024, arXiv 2403.19887; config of ai21labs/Jamba-v0.1",
    dtype="bfloat16",
    make=_jamba,
)


def names() -> list[str]:
    """Returns the names of all rows."""
    return list(ROWS)


def find(name: str) -> Entry:
    """Returns the row of that name: case, `_` for `-`, an organisation before a slash, `Meta-` and `-hf` are forgiven.

    Raises InputError with the nearest names where there is none.
    """
    plain = re.sub(r"[_\s]+", "-", name.strip().lower().rsplit("/", 1)[-1])
    plain = plain.removeprefix("meta-").removesuffix("-hf")
    if plain not in ROWS:
        hint = near(plain[:80], ROWS)
        raise InputError("not in the catalogue", field="model", value=name, fix=hint or "`asbuilt models` lists them")
    return ROWS[plain]
