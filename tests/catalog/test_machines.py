"""The catalogue of machines: what each row must hold, how names are found, and how people state machines themselves."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asbuilt import InputError
from asbuilt.catalog import machines
from asbuilt.catalog.machine import INSTEAD, PRECISIONS, Machine, from_calibration, parse_numbers
from asbuilt.catalog.quantities import parse_bytes, parse_count, parse_rate, parse_time, parse_tokens

ROWS = [machines.find(name) for name in machines.names()]
ISSUE = (
    "a100-40gb a100-80gb h100-pcie h100-sxm h200 b200 gb200 l4 l40s a10 t4 v100-32gb rtx-3090 rtx-4090 rtx-5090 "
    "rtx-5060 mi250x mi300x mi325x mi355x gaudi-3 tpu-v4 tpu-v5e tpu-v5p tpu-v6e m4-max cpu-2core "
    "b300 gb300 h800 h20 l20 rtx-pro-6000 a6000 dgx-spark strix-halo m5 mi355x trainium-2 tpu-v7"
)


def test_the_machines_that_were_asked_for_are_there() -> None:
    assert len(ROWS) >= 30
    assert {*ISSUE.split()} <= {*machines.names()}


@pytest.mark.parametrize("machine", ROWS, ids=lambda m: m.name)
def test_a_row_hangs_together(machine: Machine) -> None:
    """Units slip by powers of ten, and figures with sparsity by two: either leaves these bounds."""
    assert machine.source
    assert {*machine.rates} <= {*PRECISIONS}
    assert 4 <= machine.memory_gb <= 1024
    assert 10e9 <= machine.bandwidth <= 20e12
    if machine.reported_gib is not None:  # never more than the chips hold
        assert 0.6 * machine.memory_gb < machine.reported_gib <= machine.memory_gb * 1.001
    assert machine.link is None or machine.link.bandwidth < machine.bandwidth
    # what is narrower is never slower
    order = [machine.rates[p] for p in ("fp32", "tf32", "bf16", "fp8", "fp4") if p in machine.rates]
    assert order == sorted(order)
    for narrow, wide in (("int8", "bf16"), ("fp8", "bf16"), ("fp4", "fp8"), ("int4", "int8")):
        if narrow in machine.rates and wide in machine.rates:
            assert machine.rates[narrow] / machine.rates[wide] <= 4.01


# dense, from the sheets; the same with sparsity is twice that and must not stand here
KNOWN = {
    "a100-80gb": (2039, 312),
    "h100-sxm": (3350, 989.4),
    "h200": (4800, 989.4),
    "mi300x": (5300, 1307.4),
    "tpu-v5e": (819, 197),
    "tpu-v6e": (1638, 918),
    "gaudi-3": (3700, 1835),
    "l4": (300, 121),
    "rtx-4090": (1008, 165.2),
}


@pytest.mark.parametrize("name", KNOWN)
def test_dense_rates(name: str) -> None:
    machine, (gigabytes, tera) = machines.find(name), KNOWN[name]
    assert (machine.bandwidth, machine.rates["bf16"]) == (gigabytes * 1e9, tera * 1e12)


def test_memory_by_convention() -> None:
    h100 = machines.find("h100-sxm")
    assert h100.memory_bytes("vendor") == 80 * 10**9
    assert h100.memory_bytes("binary") == 80 * 2**30
    assert h100.memory_bytes("reported") / 2**30 == pytest.approx(79.65, abs=0.005)
    assert machines.find("tpu-v4").memory_bytes("reported") == 32 * 10**9  # nothing else is known
    assert machines.find("gaudi-3").memory_bytes() == 128 * 10**9


# GiB that PyTorch names as the total capacity in published out-of-memory messages; of TPUs, what XLA names
TOLD = {
    "a100-80gb": 79.2,
    "h100-sxm": 79.19,
    "rtx-3090": 23.58,
    "l40s": 44.4,
    "h200": 139.8,
    "b200": 178.35,
    "mi300x": 191.98,
    "mi250x": 63.98,
    "tpu-v6e": 31.25,
}


@pytest.mark.parametrize("name", TOLD)
def test_memory_is_what_a_process_gets(name: str) -> None:
    machine = machines.find(name)
    assert machine.memory_bytes() == machine.memory_bytes("process") == int(TOLD[name] * 2**30)
    assert machine.process_source


def test_where_no_log_says_it_a_stated_rule_does() -> None:
    a40 = machines.find("a40")
    assert a40.memory_bytes() == (46068 - 480) * 2**20
    assert "a rule: 480 MiB less" in a40.process_source
    assert machines.find("m4-max").memory_bytes() == 96 * 2**30  # Metal's recommended working set of 128 GB


def test_one_die_of_a_tpu_v7_is_the_device() -> None:
    """A chip has 192 GiB, 7,380 GB/s, 2,307 TFLOP/s bf16 and 4,614 fp8, and JAX shows two devices of it."""
    die = machines.find("tpu-v7")
    assert (2 * die.memory_gb, 2 * die.bandwidth) == (192, 7380e9)
    assert {name: 2 * rate for name, rate in die.rates.items()} == {"bf16": 2307e12, "fp8": 4614e12}


def test_one_die_of_an_mi250x_is_the_device() -> None:
    die = machines.find("mi250x")
    assert (die.memory_gb, die.bandwidth, die.rates["bf16"]) == (64, 1638.4e9, 191.5e12)


@pytest.mark.parametrize(
    ("said", "memory"),
    [
        ("h100-sxm", int(79.19 * 2**30)),
        ("h100-sxm,bf16=900T", int(79.19 * 2**30)),
        ("h100-sxm,memory=96GB", 96 * 10**9),  # what was known of 80 GB is not true of 96
        ("h100-sxm,reported=79GiB", 79 * 2**30),
        ("h100-sxm,process=78GiB", 78 * 2**30),
        ("memory=80GB,bandwidth=2TB/s", 80 * 10**9),
        ("memory=80GB,bandwidth=2TB/s,reported=79GiB", 79 * 2**30),
        ("memory=80GB,bandwidth=2TB/s,reported=79GiB,process=78GiB", 78 * 2**30),
    ],
)
def test_memory_of_numbers_that_are_given(said: str, memory: int) -> None:
    assert machines.resolve(said).memory_bytes() == memory


def test_a_missing_precision_is_multiplied_at_a_wider_one() -> None:
    a100, v100 = machines.find("a100-80gb"), machines.find("v100-32gb")
    assert a100.rate("fp8") == (312e12, "bf16")
    assert v100.rate("bf16") == (125e12, "fp16")
    assert machines.find("h100-sxm").rate("fp8")[1] == "fp8"
    with pytest.raises(InputError, match=r"no rate is known.*fp32=100T"):
        machines.find("tpu-v4").rate("fp32")
    assert {*INSTEAD} | {"fp32"} == {*PRECISIONS}
    assert machines.find("h100-sxm").rate("fp4")[1] == "bf16"  # weights of four bits are widened
    assert machines.find("l4").rate("int4")[1] == "int8"
    assert machines.find("mi250x").rate("fp8")[1] == "bf16"
    assert v100.rate("tf32")[1] == "fp32"


@pytest.mark.parametrize("said", ["H100 SXM", "h100_sxm", "NVIDIA H100-SXM", " h100-sxm "])
def test_names_are_forgiven(said: str) -> None:
    assert machines.find(said).name == "h100-sxm"


@pytest.mark.parametrize(("said", "near"), [("h100", "h100-sxm"), ("h1000-sxm", "h100-sxm"), ("rtx4090", "rtx-4090")])
def test_near_names_are_told(said: str, near: str) -> None:
    with pytest.raises(InputError, match=near):
        machines.resolve(said)


def test_explicit_numbers() -> None:
    machine = machines.resolve("memory=80GB, bandwidth=2TB/s,bf16=312T,reported=79.65GiB,link=300GB/s,name=mine")
    assert machine.name == "mine"
    assert machine.memory_bytes("vendor") == 80 * 10**9
    assert machine.memory_bytes() == int(79.65 * 2**30)
    assert machine.bandwidth == 2e12
    assert machine.rates == {"bf16": 312e12}
    assert machine.link is not None
    assert machine.link.bandwidth == 300e9


def test_a_toml_file_says_the_same(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('memory = "80GB"\nbandwidth = "2TB/s"\n[rates]\nbf16 = "312T"\nfp8 = 624e12\n')
    machine = machines.resolve(str(file))
    assert machine.name == "mine"
    assert (machine.memory_gb, machine.bandwidth) == (80, 2e12)
    assert machine.rates == {"bf16": 312e12, "fp8": 624e12}


WRONG = [
    "memory=80GB",
    "memory=80GB/s,bandwidth=2TB/s",
    "memory=-1GB,bandwidth=2TB/s",
    "memory=0,bandwidth=2TB/s",
    "memory=80GB,bandwidth=2TB/s,memory=3GB",
    "memory=80GB,bandwidth=2TB/s,bf17=3T",
    "memory=80GB,bandwidth=2TB/s,bf16=fast",
    "memory=1e60GB,bandwidth=2TB/s",
    "memory=80GB,bandwidth=2TB/s,kind=toaster",
    "=",
    "memory=80GB,,bandwidth=2TB/s",
]


@pytest.mark.parametrize("said", WRONG)
def test_wrong_numbers_are_refused_by_name(said: str) -> None:
    with pytest.raises(InputError) as refused:
        machines.resolve(said)
    assert refused.value.field.partition(":")[0] == "gpu"


@pytest.mark.parametrize("text", ["memory = 3", "[rates]\nbf16 = true\n", "rates = 3", "memory = [", "\xff", "a = 1"])
def test_wrong_files_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(InputError):
        machines.resolve(str(file))
    with pytest.raises(InputError, match="cannot be read"):
        machines.resolve(str(tmp_path / "absent.toml"))


HUGE = [
    "memory = 1" + "0" * 5000,
    "memory = 1" + "0" * 4000,
    "memory = 0x" + "f" * 5000,
    "memory = 1e400",
    "memory = inf",
    "memory = nan",
    "memory = " + "[" * 2000,
    "a" * 70_000,
]


@pytest.mark.parametrize("text", HUGE, ids=lambda text: text[:20])
def test_numbers_beyond_bounds_and_hostile_files_are_one_message(tmp_path: Path, text: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f'{text}\nbandwidth = "2TB/s"\n')
    with pytest.raises(InputError) as refused:
        machines.resolve(str(file))
    assert len(str(refused.value)) < 500


def test_a_machine_s_file_is_small(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('memory = "80GB"\nbandwidth = "2TB/s"\n' + " " * 2**16)
    with pytest.raises(InputError, match="gpu: too large"):
        machines.resolve(str(file))


def test_a_pipe_or_a_device_is_no_machine(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")  # reading it would wait for ever
    (tmp_path / "zero.toml").symlink_to("/dev/zero")
    for name in ("pipe.toml", "zero.toml"):
        with pytest.raises(InputError, match="gpu: is a pipe, a socket or a device"):
            machines.resolve(str(tmp_path / name))


@given(st.floats(1e-3, 1e6), st.sampled_from(["", "k", "M", "G", "T"]), st.sampled_from(["", "i"]))
def test_sizes_are_read_as_written(value: float, prefix: str, binary: str) -> None:
    binary = binary if prefix else ""
    power = {"": 0, "k": 1, "M": 2, "G": 3, "T": 4}[prefix]
    unit = (1024 if binary else 1000) ** power
    assert parse_bytes(f"{value:.6f}{prefix}{binary}B", "x") == pytest.approx(round(value, 6) * unit)
    if not binary:
        assert parse_rate(f"{value:.6f}{prefix}", "x") == pytest.approx(round(value, 6) * unit)


@given(st.text(max_size=30))
def test_any_text_is_a_machine_or_an_input_error(text: str) -> None:
    for parse in (machines.resolve, parse_numbers):
        try:
            assert isinstance(parse(text), Machine)
        except InputError as error:
            json.dumps(str(error))


@pytest.mark.parametrize(("text", "count"), [("15T", 15e12), ("70B", 70e9), ("7.5e9", 7.5e9), ("20k", 2e4), (8, 8)])
def test_counts(text: str | float, count: float) -> None:
    assert parse_count(text, "tokens") == count


@pytest.mark.parametrize("text", ["15TFLOP/s", "-5", "abc", "nan", "", "0", True])
def test_no_counts(text: str | float) -> None:
    with pytest.raises(InputError, match="tokens"):
        parse_count(text, "tokens")


@pytest.mark.parametrize(("text", "per_second"), [("50", True), ("3", False), (" 80 ", False)])
def test_a_small_bare_number_of_bytes_wants_a_unit(text: str, per_second: bool) -> None:
    with pytest.raises(InputError, match="no unit"):
        parse_bytes(text, "network", per_second=per_second)
    with pytest.raises(InputError, match="no unit"):  # a file may say it as a number
        parse_bytes(float(text), "network", per_second=per_second)
    assert parse_bytes(f"{text.strip()}GB", "network") == float(text) * 1e9
    assert parse_bytes("80000000000", "memory") == 80e9


# bytes/s; B is a byte, b a bit: an adapter of 400 Gb/s is 50 GB/s
RATES = [
    ("400Gb/s", 50e9),
    ("400Gbit/s", 50e9),
    ("400 Gbps", 50e9),
    ("400gbps", 50e9),
    ("400 Gbits/s", 50e9),
    ("400000Mb/s", 50e9),
    ("3.2Tb/s", 400e9),
    ("400Gib/s", 400 * 2**30 / 8),
    ("50GB/s", 50e9),
    ("50GBps", 50e9),
    ("50GiB/s", 50 * 2**30),
    ("50 GB", 50e9),
    ("50GBytes/s", 50e9),
    ("50e9", 50e9),
    (50e9, 50e9),
    ("400G", None),
    ("400gb/s", None),
    ("400GBPS", None),
    ("400", None),
    ("-3GB/s", None),
]


@pytest.mark.parametrize(("text", "rate"), RATES, ids=str)
def test_bits_and_bytes(text: str | float, rate: float | None) -> None:
    """Of rates either is understood, and where the letters do not tell which the message shows both."""
    if rate is not None:
        assert parse_bytes(text, "network", per_second=True) == pytest.approx(rate, rel=1e-15)
    else:
        with pytest.raises(InputError, match="or 400Gb/s in bits"):
            parse_bytes(text, "network", per_second=True)


@pytest.mark.parametrize("text", ["80GB", "80gb", "80 G", "80000000000", "80e9", "80000 MB", "80 gbytes"])
def test_memory_is_in_bytes(text: str) -> None:
    assert parse_bytes(text, "memory") == 80e9


@pytest.mark.parametrize("text", ["80Gb", "80Gbit", "80GB/s", "80 Gbps", "80Tib"])
def test_memory_is_not_in_bits(text: str) -> None:
    with pytest.raises(InputError, match="memory"):
        parse_bytes(text, "memory")


def test_links_in_bits_reach_the_machine(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('memory = "80GB"\nbandwidth = "16Tb/s"\nlink = "400Gb/s"\n')
    for machine in (machines.resolve("memory=80GB,bandwidth=16Tbit/s,link=400Gbps"), machines.resolve(str(file))):
        assert machine.link is not None
        assert (machine.bandwidth, machine.link.bandwidth) == (2e12, 50e9)


TIMES = [
    ("20ms", 0.02),
    ("0.02s", 0.02),
    ("20 ms", 0.02),
    ("20000us", 0.02),
    ("20000µs", 0.02),
    ("2e-2 s", 0.02),
    ("2 sec", 2),
    ("1 second", 1),
]


@pytest.mark.parametrize(("text", "seconds"), TIMES)
def test_times(text: str, seconds: float) -> None:
    assert parse_time(text, "x") == pytest.approx(seconds, rel=1e-15)


def test_a_bare_time_wants_a_unit() -> None:
    with pytest.raises(InputError, match=r"latency-target: has no unit \(got '20'; must be a time such as 20ms or"):
        parse_time("20", "latency-target")
    for text in ("0.5", "soon", "", "20m", "-5ms", "0ms", "20 GB", "1e30s"):
        with pytest.raises(InputError, match="latency-target"):
            parse_time(text, "latency-target")


TOKENS = [
    ("8192", 8192),
    ("128k", 128_000),
    ("128K", 131_072),
    ("128Ki", 131_072),
    ("128ki", 131_072),
    ("131,072", 131_072),
    ("1.5k", 1500),
    ("1m", 1_000_000),
    ("1M", 1_048_576),
    (7, 7),
]


@pytest.mark.parametrize(("text", "tokens"), TOKENS, ids=str)
def test_lengths(text: str | int, tokens: int) -> None:
    """As engines read them: k is a thousand, K and Ki are 1,024."""
    assert parse_tokens(text, "context") == tokens


@pytest.mark.parametrize("text", ["0", "-1", "1.0001k", "many", "", "1e-5", "128kB", 0, -3, True, "9" * 40])
def test_no_lengths(text: str | int) -> None:
    with pytest.raises(InputError, match="context"):
        parse_tokens(text, "context")


@pytest.mark.parametrize("number", [10**400, 1e22, float("nan"), float("inf"), 0, -1.0, True])
def test_numbers_that_are_no_size(number: float) -> None:
    with pytest.raises(InputError, match="memory"):
        parse_bytes(number, "memory")


# as nvidia-smi (and its -L), rocm-smi and PyTorch print them
PRINTED = {
    "NVIDIA H100 80GB HBM3": "h100-sxm",
    "NVIDIA H100 80GB HBM2e": "h100-pcie",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H100 NVL": "h100-nvl",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "NVIDIA GB200": "gb200",
    "NVIDIA GH200 480GB": "gh200-96gb",
    "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100 80GB PCIe": "a100-80gb-pcie",
    "NVIDIA L4": "l4",
    "NVIDIA L40S": "l40s",
    "NVIDIA A10": "a10",
    "NVIDIA RTX 6000 Ada Generation": "rtx-6000-ada",
    "Tesla T4": "t4",
    "Tesla V100-SXM2-16GB": "v100-16gb",
    "Tesla V100-SXM3-32GB": "v100-32gb",
    "NVIDIA GeForce RTX 3090": "rtx-3090",
    "NVIDIA GeForce RTX 3090 Ti": "rtx-3090-ti",
    "NVIDIA GeForce RTX 4090": "rtx-4090",
    "NVIDIA GeForce RTX 5090": "rtx-5090",
    "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-2f0f4d8e-0d2e-4a6e-9d7e-0b5c1c1f3a11)": "h100-sxm",
    "NVIDIA B300 SXM6 AC": "b300",
    "NVIDIA GB300": "gb300",
    "NVIDIA H800": "h800",
    "NVIDIA H20": "h20",
    "NVIDIA L20": "l20",
    "NVIDIA RTX A6000": "a6000",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "rtx-pro-6000",
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": "rtx-pro-6000-max-q",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "rtx-pro-6000-server",
    "NVIDIA GB10": "dgx-spark",
    "AMD Radeon 8060S": "strix-halo",
    "TPU7x": "tpu-v7",
    "Trainium2": "trainium-2",
    "3D controller: NVIDIA Corporation GH100 [H100 SXM5 80GB] (rev a1)": "h100-sxm",
    "18:00.0 3D controller [0302]: NVIDIA Corporation GH100 [H100 SXM5 80GB] [10de:2330] (rev a1)": "h100-sxm",
    '04:00.0 "3D controller" "NVIDIA Corporation" "GH100 [H200 SXM 141GB]" -ra1': "h200",
    "NVIDIA Corporation GA100 [A100 SXM4 80GB] (rev a1)": "a100-80gb",
    "NVIDIA Corporation GA100 [A100 PCIe 80GB] (rev a1)": "a100-80gb-pcie",
    "NVIDIA Corporation GA102GL [RTX A6000] (rev a1)": "a6000",
    "NVIDIA Corporation TU104GL [Tesla T4] (rev a1)": "t4",
    "NVIDIA Corporation AD102GL [L40S] (rev a1)": "l40s",
    "NVIDIA Corporation GB202 [GeForce RTX 5090] (rev a1)": "rtx-5090",
    "Advanced Micro Devices, Inc. [AMD/ATI] Aqua Vanjaram [Instinct MI300X]": "mi300x",
    "Advanced Micro Devices, Inc. [AMD/ATI] Aldebaran/MI200 [Instinct MI250X/MI250]": "mi250x",
    "AMD Instinct MI300X": "mi300x",
    "AMD Instinct MI300X OAM": "mi300x",
    "AMD Radeon RX 7900 XTX": "rx-7900-xtx",
    "Apple M4 Max": "m4-max",
    "TPU v5 lite": "tpu-v5e",
}


@pytest.mark.parametrize("printed", PRINTED)
def test_names_that_tools_print(printed: str) -> None:
    assert machines.resolve(printed).name == PRINTED[printed]
    assert machines.resolve(f"{printed},bandwidth=1TB/s").bandwidth == 1e12


# other chips of nearly the same name, and slices of one
@pytest.mark.parametrize(
    "printed",
    [
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA H800 PCIe",
        "NVIDIA H200 NVL",
        "Tesla V100-PCIE-16GB",
        "NVIDIA",
        "",
        "GPU 0:",
    ],
)
def test_names_that_are_another_machine_s(printed: str) -> None:
    with pytest.raises(InputError, match="unknown machine"):
        machines.resolve(printed)


@pytest.mark.parametrize("machine", ROWS, ids=lambda m: m.name)
def test_the_source_names_what_the_row_is_of(machine: Machine) -> None:
    sold = {
        "v": "NVIDIA",
        "t4": "NVIDIA",
        "a": "NVIDIA",
        "l": "NVIDIA",
        "rtx": "NVIDIA",
        "h": "NVIDIA",
        "g": "NVIDIA",
        "b": "NVIDIA",
        "mi": "AMD",
        "rx": "AMD",
        "epyc": "AMD",
        "dgx": "NVIDIA",
        "strix": "AMD",
        "trainium": "Amazon",
        "gaudi": "Intel",
        "xeon": "Intel",
        "tpu": "Google",
        "m": "Apple",
        "cpu": "generic",
    }
    starts = [start for start in sold if machine.name.startswith(start)]
    assert machine.vendor == sold[max(starts, key=len)]
    plain = "".join(c for c in machine.source.lower() if c.isalnum())
    pieces = [piece for piece in machine.name.split("-") if not piece.endswith("gb")]
    assert machine.vendor == "generic" or all(piece in plain for piece in pieces)


def test_the_machine_that_was_calibrated() -> None:
    """What `asbuilt measure --json` prints of it; formats that are no precision of a machine are left out."""
    plain = {
        "machine": {"processor": "p" * 500, "threads": 3, "memory_bytes": 5 * 10**9},
        "read_bandwidth": 2e10,
        "rates": {"fp32": {"product_rate": 1e11}, "bf16": {"product_rate": 3e11}, "fp12": {"product_rate": 1.0}},
    }
    found = from_calibration(plain)
    assert (found.name, found.kind, found.source) == ("this", "cpu", f"measured: {'p' * 200}, 3 threads")
    assert (found.memory_gb, found.bandwidth, found.rates) == (5.0, 2e10, {"fp32": 1e11, "bf16": 3e11})
    assert found.link is None
    for broken in ({}, {**plain, "machine": {}}, {**plain, "rates": {"fp32": {}}}, {**plain, "rates": None}):
        with pytest.raises(InputError, match="asbuilt measure --json"):
            from_calibration(broken)
