"""The catalogue: its rows are the published configs, found under the names people type, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from asbuilt import cost
from asbuilt.catalog import find, names
from asbuilt.errors import InputError
from asbuilt.families import FAMILIES, load_config_file, read_config, write_config
from asbuilt.spec import weights

MODELS = Path(__file__).parents[3] / "shared" / "models"
# The shared files of Llama 2 are the first revision, whose context was corrected from 2048 to the paper's 4096 later.
CONTEXT_CORRECTED = ("llama-2-7b", "llama-2-70b")
# Billions of parameters as published, rounded or cut off, for rows whose config is not at hand.
ROUNDED = {
    "rwkv7-0.1b-world": 0.191,
    "rwkv7-0.4b-world": 0.4,
    "rwkv7-1.5b-world": 1.5,
    "rwkv7-2.9b-world": 2.9,
    "xlstm-7b": 6.87,
    "whisper-tiny": 0.038,
    "paligemma-3b-pt-224": 2.923,
    "nemotron-3-nano-30b": 31.6,
    "nemotron-3-super-120b": 120.6,
    "whisper-large-v3": 1.543,
    "voxtral-mini-3b": 4.68,
    "llama-3.2-90b-vision": 88.6,
    "lfm2.5-vl-1.6b": 1.6,
    "siglip-so400m-patch14-384": 0.878,
    "dinov2-base": 0.087,
    "dinov3-vits16": 0.021,
    "dinov3-vith16plus": 0.84,
    "qwen2.5-vl-7b": 8.29,
    "qwen3-vl-2b": 2.13,
    "kimi-k2.5": 1026.88,
    "devstral-small-2-24b": 24.01,
    "bart-base": 0.139,
    "bart-large": 0.406,
    "xlm-roberta-base": 0.278,
    "bge-m3": 0.568,
    "nomic-embed-text-v1.5": 0.137,
    "distilbert-base-uncased": 0.067,
    "all-mpnet-base-v2": 0.109,
    "albert-base-v2": 0.012,
    "deberta-v3-base": 0.184,
    "deberta-v2-xlarge": 0.9,
    "electra-small-discriminator": 0.014,
    "mt5-small": 0.300,
    "t5-11b": 11.3,
    "t5-large": 0.737,
    "distilgpt2": 0.082,
    "gpt2-medium": 0.355,
    "llama-1-13b": 13.0,
    "llama-1-30b": 32.5,
    "llama-1-65b": 65.2,
    "llama-2-13b": 13.0,
    "llama-3.1-70b": 70.6,
    "llama-3.3-70b": 70.6,
    "llama-3.2-3b": 3.21,
    "smollm2-360m": 0.362,
    "tinyllama-1.1b": 1.10,
    "palm-8b": 8.63,
    "palm-62b": 62.50,
    "gpt-oss-120b": 116.83,
    "deepseek-v3.2": 671.88,
    "deepseek-v4-flash": 284.33,
    "deepseek-v4-pro": 1573.00,
    "glm-5": 743.91,
    "glm-5.2": 743.38,
    "olmo-3.1-32b": 32.23,
    "exaone-4.0-32b": 32.00,
    "minimax-m2.7": 228.69,
    "mimo-v2-flash": 308.78,
}

# Parameters as built, tokens of context, and bytes of cache a token in 16 bits while no window is full. They were held
# against the published configs and the counts of their checkpoints, which are not at hand everywhere.
COUNTED = {
    "olmo-3.1-32b": (32_233_522_176, 65_536, 262_144),
    "exaone-4.0-32b": (32_003_216_384, 131_072, 262_144),
    "minimax-m2.7": (228_689_748_992, 204_800, 253_952),
    "mimo-v2-flash": (308_778_768_832, 262_144, 222_720),
    "rwkv-4-169m": (169_342_464, 1024, 0),
    "transfo-xl-wt103": (285_205_322, 1 << 20, 36_864),
    "rwkv7-0.1b-world": (191_034_624, 4096, 0),
    "rwkv7-0.4b-world": (450_767_872, 4096, 0),
    "rwkv7-1.5b-world": (1_527_404_544, 4096, 0),
    "rwkv7-2.9b-world": (2_947_735_040, 4096, 0),
    "xlstm-7b": (6_865_424_896, 1 << 20, 0),
    "paligemma-3b-pt-224": (2_923_466_480, 8192, 18_432),
    "recurrentgemma-2b": (2_682_862_080, 8192, 8192),
    "zamba2-7b": (7_356_749_648, 4096, 372_736),
    "whisper-tiny": (37_760_640, 448, 6_144),
    "whisper-large-v3": (1_543_490_560, 448, 163_840),
    "llama-3.2-90b-vision": (88_593_355_323, 131_072, 327_680),
    "voxtral-mini-3b": (4_676_271_104, 131_072, 122_880),
    "lfm2.5-vl-1.6b": (1_596_625_904, 128_000, 12_288),
    "distilgpt2": (81_912_576, 1_024, 18_432),
    "gpt2": (124_439_808, 1_024, 36_864),
    "gpt2-medium": (354_823_168, 1_024, 98_304),
    "gpt2-large": (774_030_080, 1_024, 184_320),
    "gpt2-xl": (1_557_611_200, 1_024, 307_200),
    "gpt3-175b": (174_604_259_328, 2_048, 4_718_592),
    "llama-1-7b": (6_738_415_616, 2_048, 524_288),
    "llama-1-13b": (13_015_864_320, 2_048, 819_200),
    "llama-1-30b": (32_528_943_616, 2_048, 1_597_440),
    "llama-1-65b": (65_285_660_672, 2_048, 2_621_440),
    "llama-2-7b": (6_738_415_616, 4_096, 524_288),
    "llama-2-13b": (13_015_864_320, 4_096, 819_200),
    "llama-2-70b": (68_976_648_192, 4_096, 327_680),
    "llama-3-8b": (8_030_261_248, 8_192, 131_072),
    "llama-3-70b": (70_553_706_496, 8_192, 327_680),
    "llama-3.1-8b": (8_030_261_248, 131_072, 131_072),
    "llama-3.1-70b": (70_553_706_496, 131_072, 327_680),
    "llama-3.1-405b": (405_853_388_800, 131_072, 516_096),
    "llama-3.3-70b": (70_553_706_496, 131_072, 327_680),
    "llama-3.2-1b": (1_235_814_400, 131_072, 32_768),
    "llama-3.2-3b": (3_212_749_824, 131_072, 114_688),
    "smollm2-135m": (134_515_008, 8_192, 23_040),
    "smollm2-360m": (361_821_120, 8_192, 40_960),
    "smollm2-1.7b": (1_711_376_384, 8_192, 196_608),
    "tinyllama-1.1b": (1_100_048_384, 2_048, 22_528),
    "gpt-neox-20b": (20_554_567_680, 2_048, 1_081_344),
    "pythia-70m": (70_426_624, 2_048, 12_288),
    "bert-base-uncased": (109_514_298, 512, 0),
    "all-minilm-l6-v2": (22_713_216, 512, 0),
    "roberta-base": (124_697_433, 512, 0),
    "xlm-roberta-base": (278_295_186, 512, 0),
    "bge-m3": (567_754_752, 8_192, 0),
    "distilbert-base-uncased": (66_985_530, 512, 0),
    "all-mpnet-base-v2": (109_486_464, 512, 0),
    "deberta-v3-base": (184_551_780, 512, 0),
    "deberta-v2-xlarge": (887_085_156, 512, 0),
    "albert-base-v2": (11_221_680, 512, 0),
    "electra-small-discriminator": (13_549_057, 512, 0),
    "nomic-embed-text-v1.5": (136_731_648, 8_192, 0),
    "modernbert-base": (149_655_232, 8_192, 0),
    "palm-8b": (8_632_012_800, 2_048, 32_768),
    "palm-62b": (62_495_662_080, 2_048, 65_536),
    "palm-540b": (540_356_474_880, 2_048, 120_832),
    "chinchilla-70b": (70_056_681_472, 2_048, 2_621_440),
    "opt-1.3b": (1_315_758_080, 2_048, 196_608),
    "qwen1.5-7b": (7_721_324_544, 32_768, 524_288),
    "qwen2-0.5b": (494_032_768, 32_768, 12_288),
    "qwen2.5-7b": (7_615_616_512, 32_768, 57_344),
    "qwen3-0.6b": (596_049_920, 40_960, 114_688),
    "qwen3-8b": (8_190_735_360, 40_960, 147_456),
    "mistral-7b-v0.1": (7_241_732_096, 32_768, 131_072),
    "olmo-1b": (1_176_764_416, 2_048, 131_072),
    "olmo-2-7b": (7_298_617_344, 4_096, 524_288),
    "starcoder2-3b": (3_030_371_328, 16_384, 30_720),
    "command-r-35b": (34_980_831_232, 8_192, 1_310_720),
    "bloom-560m": (559_214_592, 2_048, 98_304),
    "bloom-176b": (176_247_271_424, 2_048, 4_014_080),
    "mixtral-8x7b": (46_702_792_704, 32_768, 131_072),
    "qwen3-30b-a3b": (30_532_122_624, 40_960, 98_304),
    "olmoe-1b-7b": (6_919_161_856, 4_096, 131_072),
    "glm-4.5-air": (106_852_245_504, 131_072, 188_416),
    "gpt-oss-20b": (20_914_757_184, 131_072, 49_152),
    "gpt-oss-120b": (116_829_156_672, 131_072, 73_728),
    "llama-4-scout-text": (107_769_861_120, 10_485_760, 196_608),
    "deepseek-moe-16b": (16_375_728_128, 4_096, 229_376),
    "deepseek-v2": (235_741_434_880, 163_840, 69_120),
    "deepseek-v3": (671_026_404_352, 163_840, 70_272),
    "deepseek-v3.2": (671_877_929_216, 163_840, 85_888),
    "deepseek-v4-flash": (284_332_230_231, 1_048_576, 199_392),
    "deepseek-v4-pro": (1_572_997_179_491, 1_048_576, 289_400),
    "glm-5": (743_911_199_232, 202_752, 109_824),
    "glm-5.2": (743_377_000_704, 1_048_576, 95_232),
    "jamba-v0.1": (51_570_323_328, 262_144, 16_384),
    "mamba-130m": (129_135_360, 1_048_576, 0),
    "mamba2-2.7b": (2_702_599_680, 1_048_576, 0),
    "falcon-mamba-7b": (7_272_665_088, 1_048_576, 0),
    "nemotron-h-56b": (56_324_350_464, 8_192, 40_960),
    "nemotron-3-nano-30b": (31_577_937_344, 262_144, 6_144),
    "nemotron-3-super-120b": (120_668_687_360, 262_144, 8_192),
    "mpt-7b": (6_649_286_656, 2_048, 524_288),
    "falcon-7b": (6_921_720_704, 2_048, 8_192),
    "gemma-2b": (2_506_172_416, 8_192, 18_432),
    "gemma-7b": (8_537_680_896, 8_192, 458_752),
    "gemma-2-2b": (2_614_341_888, 8_192, 106_496),
    "gemma-2-27b": (27_227_128_320, 8_192, 376_832),
    "gemma-3-1b": (999_885_952, 32_768, 26_624),
    "gemma-3-4b": (3_880_263_168, 131_072, 139_264),
    "phi-2": (2_779_683_840, 2_048, 327_680),
    "phi-3-mini": (3_821_079_552, 4_096, 393_216),
    "t5-small": (60_506_624, 512, 12_288),
    "t5-base": (222_903_552, 512, 36_864),
    "t5-large": (737_668_096, 512, 98_304),
    "t5-3b": (2_851_598_336, 512, 393_216),
    "t5-11b": (11_307_321_344, 512, 1_572_864),
    "flan-t5-base": (247_577_856, 512, 36_864),
    "mt5-small": (300_176_768, 512, 12_288),
    "switch-base-8": (619_339_008, 512, 36_864),
    "transformer-base": (64_131_072, 1_024, 12_288),
    "transformer-big": (216_342_528, 1_024, 24_576),
    "bart-base": (139_420_416, 1_024, 18_432),
    "bart-large": (406_291_456, 1_024, 49_152),
    "vit-base-patch16-224": (86_567_656, 197, 0),
    "clip-vit-base-patch32": (151_277_313, 77, 0),
    "dinov2-base": (86_580_480, 1_370, 0),
    "dinov3-vits16": (21_596_544, 201, 0),
    "dinov3-vith16plus": (840_592_640, 201, 0),
    "siglip-so400m-patch14-384": (877_960_498, 64, 0),
    "llava-1.5-7b": (7_063_427_072, 4_096, 524_288),
    "gemma-3-4b-mm": (4_300_079_472, 163_840, 139_264),
    "llama-4-scout": (108_641_793_536, 10_485_760, 196_608),
    "qwen2.5-vl-7b": (8_292_166_656, 128_000, 57_344),
    "qwen3-vl-2b": (2_127_532_032, 262_144, 114_688),
    "kimi-k2.5": (1_026_879_353_328, 262_144, 70_272),
    "devstral-small-2-24b": (24_011_361_280, 393_216, 163_840),
    "qwen3-next-80b": (79_674_391_296, 262_144, 24_576),
}


@pytest.mark.parametrize("name", names())
def test_a_row_keeps_its_size(name: str) -> None:
    spec = find(name).spec()
    assert (cost.total_parameters(spec), spec.max_positions, cost.cache(spec, 1, "bf16").per_token) == COUNTED[name]


@pytest.mark.parametrize("name", names())
def test_row_is_the_published_config(name: str) -> None:
    path = MODELS / f"{name.removesuffix('-text')}.json"
    entry = find(name)
    spec = entry.spec()
    if name in ROUNDED:
        billions = sum(weight.size for _, weight, _ in weights(spec)) / 1e9
        digits = len(str(ROUNDED[name]).partition(".")[2])
        assert abs(billions - ROUNDED[name]) < 10.0**-digits
        return
    if not MODELS.exists():
        pytest.skip(f"no published models at {MODELS}")
    assert path.exists(), "neither a published config nor a number in ROUNDED to hold the row against"
    config = load_config_file(path)
    published = read_config(config["text_config"] if name.endswith("-text") else config, name)
    if name in CONTEXT_CORRECTED:
        assert published.spec.max_positions == spec.max_positions // 2
        spec = replace(spec, max_positions=published.spec.max_positions)
    assert spec == published.spec
    assert entry.family == published.family
    assert published.dtype in (None, entry.dtype)
    assert published.quantization == entry.quantization


def test_every_published_config_of_a_family_has_a_row() -> None:
    if not MODELS.exists():
        pytest.skip(f"no published models at {MODELS}")
    files = {path.stem: json.loads(path.read_text()) for path in MODELS.glob("*.json")}
    ours = {name for name, config in files.items() if isinstance(config, dict) and config.get("model_type") in FAMILIES}
    assert ours
    assert ours <= set(names())


@pytest.mark.parametrize("name", names())
def test_row_can_be_written_as_a_config(name: str) -> None:
    entry = find(name)
    spec = entry.spec()
    assert read_config(write_config(entry.family, spec, {}, entry.dtype), name).spec == spec
    assert spec.name == name
    assert entry.source
    assert not entry.source.endswith(("/", ", ", " "))  # the config that is meant is named to its end


@pytest.mark.parametrize(
    "typed",
    ["Llama-3-8B", "llama_3_8b", "meta-llama/Meta-Llama-3-8B", " llama-3-8b ", "META-LLAMA/llama-3-8b"],
)
def test_spellings(typed: str) -> None:
    assert find(typed).name == "llama-3-8b"


def test_a_hub_suffix() -> None:
    assert find("meta-llama/Llama-2-7b-hf").name == "llama-2-7b"


def test_unknown_names_are_told_their_neighbours() -> None:
    with pytest.raises(InputError, match="llama-3-8b"):
        find("llama-3-8")
    with pytest.raises(InputError, match="asbuilt models"):
        find("§" * 1000)


def test_no_torch_and_no_numpy() -> None:
    code = "import sys, asbuilt.catalog, asbuilt.families.llama; print({'torch', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_what_is_published_packed() -> None:
    """Tiles of DeepSeek-V3 (its report's section 3.3); of gpt-oss the experts alone."""
    packed = {name: quantization for name in names() if (quantization := find(name).quantization)}
    assert packed["deepseek-v3"]["weight_block_size"] == [128, 128]
    assert {name: said["quant_method"] for name, said in packed.items()} == {
        "deepseek-v3": "fp8",
        "deepseek-v3.2": "fp8",
        "minimax-m2.7": "fp8",
        "mimo-v2-flash": "fp8",
        "deepseek-v4-flash": "fp8",
        "deepseek-v4-pro": "fp8",
        "gpt-oss-20b": "mxfp4",
        "gpt-oss-120b": "mxfp4",
    }
