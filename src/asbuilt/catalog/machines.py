"""Accelerators and processors, one row each: memory, bandwidth, dense rates per precision, links, and the source.

Rates in TFLOP/s (TOP/s for whole numbers) are dense. Where a vendor prints a rate only with sparsity, half of it stands
here. Rates of GeForce cards are those that accumulate in float32. Links are one way, out of one device: vendors print
NVLink's and Infinity Fabric's both ways together, and half of that stands here. Reported memory is what `nvidia-smi`,
`rocm-smi` or Metal (its recommended working set) print, from logs that people published; a driver may differ by some
MiB. What a process gets of it stands in PROCESS.
"""

from __future__ import annotations

import re
from pathlib import Path

from asbuilt.catalog import slices
from asbuilt.catalog.machine import Link, Machine, parse_numbers, read_toml, with_numbers
from asbuilt.errors import InputError, near

MACHINES: dict[str, Machine] = {}
MEASURED = "this"

NVIDIA = "NVIDIA data sheet, "
AMD = "AMD Instinct data sheet, "
GOOGLE = "Google Cloud TPU documentation, "
APPLE = "Apple newsroom and technical specifications, "
ADA = "NVIDIA Ada GPU architecture whitepaper, appendix, "
AMPERE = "NVIDIA Ampere GA102 whitepaper, appendix, "
PRO = "NVIDIA RTX Blackwell PRO GPU architecture whitepaper, appendix, "
BLACKWELL = "NVIDIA RTX Blackwell GPU architecture whitepaper, appendix, "
RECALLED = "not looked up in the source again, but held against a second record"
HALVED = "rates are halves of those printed with sparsity"

NVLINK2, NVLINK3, NVLINK4, NVLINK5 = (("NVLink 2", 150), ("NVLink 3", 300), ("NVLink 4", 450), ("NVLink 5", 900))
PCIE3, PCIE4, PCIE5 = (("PCIe 3 x16", 16), ("PCIe 4 x16", 32), ("PCIe 5 x16", 64))
PCIE4_8, PCIE5_8 = ("PCIe 4 x8", 16), ("PCIe 5 x8", 32)

# GiB that a process is told it has: PyTorch's "GPU 0 has a total capacity of ..." and XLA's "... of 31.25G hbm", as
# published logs and issues have them. With the driver the figure of one card moves by up to 0.2 GiB.
PROCESS = {
    "v100-16gb": 15.77,
    "v100-32gb": 31.73,
    "t4": 14.56,
    "a10": 22.06,
    "l4": 22.03,
    "l40s": 44.4,
    "a100-40gb": 39.49,
    "a100-80gb": 79.2,
    "a100-80gb-pcie": 79.2,
    "rtx-6000-ada": 47.5,
    "h100-sxm": 79.19,
    "h100-pcie": 79.19,
    "h100-nvl": 93.1,
    "gh200-96gb": 94.5,
    "h20": 95.0,
    "h200": 139.8,
    "b200": 178.35,
    "gb200": 184.31,
    "b300": 267.69,
    "a6000": 47.53,
    "rtx-pro-6000": 94.97,
    "rtx-pro-6000-server": 94.97,
    "dgx-spark": 121.69,
    "rtx-3060": 11.63,
    "rtx-3090": 23.58,
    "rtx-4060": 7.62,
    "rtx-4090": 23.52,
    "rtx-5060-ti-16gb": 15.47,
    "rtx-5080": 15.46,
    "rtx-5090": 31.36,
    "mi250x": 63.98,
    "mi300x": 191.98,
    "mi325x": 255.98,
    "mi355x": 287.98,
    "tpu-v4": 30.75,
    "tpu-v5e": 15.75,
    "tpu-v5p": 95.74,
    "tpu-v6e": 31.25,
}
# Accelerators whose memory is the processor's too.
SHARED = ("dgx-spark", "strix-halo")
LOGS = "the total capacity that PyTorch or XLA names in published out-of-memory messages"
# For NVIDIA's others: 480 MiB less than the driver reports, the median of the rows above.
KEPT_BACK_MIB = 480
RULE = f"a rule: {KEPT_BACK_MIB} MiB less than the driver reports, the median of the cards with published logs"


def _process(name: str, vendor: str, reported_mib: float | None) -> tuple[float | None, str]:
    """Returns the GiB that a process gets, None where nothing is known, and where that stands."""
    if name in PROCESS:
        return PROCESS[name], LOGS
    if reported_mib is None:
        return None, ""
    if vendor == "NVIDIA":
        return (reported_mib - KEPT_BACK_MIB) / 1024, RULE
    return reported_mib / 1024, "as the driver reports it"


def _add(
    name: str,
    vendor: str,
    memory_gb: float,
    reported_mib: float | None,
    gigabytes_per_second: float,
    link: tuple[str, float] | None,
    source: str,
    note: str = "",
    **tera: float,
) -> None:
    """Adds a row: reported memory in MiB, bandwidth and link (one direction) in GB/s, rates in TFLOP/s."""
    process, told = _process(name, vendor, reported_mib)
    MACHINES[name] = Machine(
        name=name,
        vendor=vendor,
        kind="cpu" if vendor == "generic" or source.startswith("CPU") else "accelerator",
        shared_memory=vendor == "Apple" or name in SHARED,
        memory_gb=memory_gb,
        reported_gib=None if reported_mib is None else reported_mib / 1024,
        process_gib=process,
        process_source=told,
        bandwidth=gigabytes_per_second * 1e9,
        rates={precision: rate * 1e12 for precision, rate in tera.items()},
        link=None if link is None else Link(kind=link[0], bandwidth=link[1] * 1e9),
        source=source,
        note=note,
    )


# fmt: off
# name, vendor, memory GB, reported MiB, bandwidth GB/s, link
_add("v100-16gb", "NVIDIA", 16, 16160, 900, NVLINK2, NVIDIA + "Tesla V100 SXM2", fp32=15.7, fp16=125)
_add("v100-32gb", "NVIDIA", 32, 32510, 900, NVLINK2, NVIDIA + "Tesla V100 SXM2", fp32=15.7, fp16=125)
_add("t4", "NVIDIA", 16, 15360, 320, PCIE3, NVIDIA + "T4", "reported memory with ECC",
     fp32=8.1, fp16=65, int8=130, int4=260)
_add("a10", "NVIDIA", 24, 23028, 600, PCIE4, NVIDIA + "A10", "reported memory with ECC",
     fp32=31.2, tf32=62.5, bf16=125, fp16=125, int8=250, int4=500)
_add("a30", "NVIDIA", 24, 24576, 933, PCIE4, NVIDIA + "A30", RECALLED,
     fp32=10.3, tf32=82, bf16=165, fp16=165, int8=330, int4=661)
_add("a40", "NVIDIA", 48, 46068, 696, PCIE4, NVIDIA + "A40", "reported memory with ECC",
     fp32=37.4, tf32=74.8, bf16=149.7, fp16=149.7, int8=299.3, int4=598.7)
_A100 = {"fp32": 19.5, "tf32": 156, "bf16": 312, "fp16": 312, "int8": 624, "int4": 1248}
_add("a100-40gb", "NVIDIA", 40, 40960, 1555, NVLINK3, NVIDIA + "A100 40GB SXM", **_A100)
_add("a100-80gb", "NVIDIA", 80, 81920, 2039, NVLINK3, NVIDIA + "A100 80GB SXM",
     **_A100)
_add("a100-80gb-pcie", "NVIDIA", 80, 81920, 1935, PCIE4, NVIDIA + "A100 80GB PCIe",
     "the NVLink bridge joins pairs only and is left out", **_A100)
_add("a6000", "NVIDIA", 48, 49140, 768, PCIE4, NVIDIA + "RTX A6000",
     HALVED + "; reported memory without ECC; the NVLink bridge joins pairs only and is left out",
     fp32=38.7, tf32=77.4, bf16=154.8, fp16=154.8, int8=309.7, int4=619.3)
_add("l4", "NVIDIA", 24, 23034, 300, PCIE4, NVIDIA + "L4", HALVED + "; reported memory with ECC",
     fp32=30.3, tf32=60, bf16=121, fp16=121, fp8=242.5, int8=242.5)
_add("l40", "NVIDIA", 48, 46068, 864, PCIE4, NVIDIA + "L40", RECALLED + "; reported memory with ECC",
     fp32=90.5, tf32=90.5, bf16=181, fp16=181, fp8=362, int8=362)
_add("l40s", "NVIDIA", 48, 46068, 864, PCIE4, NVIDIA + "L40S", "reported memory with ECC",
     fp32=91.6, tf32=183, bf16=362, fp16=362, fp8=733, int8=733)
_add("l20", "NVIDIA", 48, 46068, 864, PCIE4, NVIDIA + "L20", RECALLED + "; reported memory with ECC",
     fp32=59.8, tf32=59.8, bf16=119.5, fp16=119.5, fp8=239, int8=239)
_add("rtx-6000-ada", "NVIDIA", 48, 49140, 960, PCIE4, NVIDIA + "RTX 6000 Ada", RECALLED + "; " + HALVED,
     fp32=91.1, tf32=182.1, bf16=364.2, fp16=364.2, fp8=728.5, int8=728.5)
_H100 = {"fp32": 67, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4, "fp8": 1978.9, "int8": 1978.9}
_add("h100-pcie", "NVIDIA", 80, 81559, 2000, PCIE5, NVIDIA + "H100 PCIe",
     HALVED + "; the NVLink bridge joins pairs only and is left out",
     fp32=51, tf32=378, bf16=756, fp16=756, fp8=1513, int8=1513)
_add("h100-sxm", "NVIDIA", 80, 81559, 3350, NVLINK4, NVIDIA + "H100 SXM", HALVED, **_H100)
_add("h100-nvl", "NVIDIA", 94, 95830, 3900, PCIE5, NVIDIA + "H100 NVL",
     HALVED + "; " + RECALLED, fp32=60, tf32=417.5, bf16=835.5, fp16=835.5, fp8=1671, int8=1671)
_add("h800", "NVIDIA", 80, 81559, 3350, ("NVLink, eight links of 25 GB/s", 200), NVIDIA + "H800 SXM",
     HALVED + "; an H100 with fewer links: 400 GB/s both ways, 160 one way reached (arXiv 2412.19437)", **_H100)
_add("h20", "NVIDIA", 96, 97871, 4000, NVLINK4, NVIDIA + "H20", RECALLED,
     fp32=44, tf32=74, bf16=148, fp16=148, fp8=296, int8=296)
_add("gh200-96gb", "NVIDIA", 96, 97871, 4000, NVLINK4, NVIDIA + "GH200, its Hopper GPU", RECALLED, **_H100)
_add("h200", "NVIDIA", 141, 143771, 4800, NVLINK4, NVIDIA + "H200 SXM", HALVED, **_H100)
_add("b200", "NVIDIA", 180, 183359, 8000, NVLINK5, NVIDIA + "HGX B200, one of eight",
     HALVED + "; the chip has 192 GB, of which the sheet sells 180",
     fp32=75, tf32=1100, bf16=2250, fp16=2250, fp8=4500, int8=4500, fp4=9000)
_add("gb200", "NVIDIA", 186, 189471, 8000, NVLINK5, NVIDIA + "GB200 NVL72, one GPU of a superchip's two",
     HALVED, fp32=80, tf32=1250, bf16=2500, fp16=2500, fp8=5000, int8=5000, fp4=10000)
_add("b300", "NVIDIA", 288, 275040, 8000, NVLINK5, NVIDIA + "HGX B300, one of eight",
     "rates but fp4's are halves of those printed with sparsity; two dies, one device to programs; " + RECALLED,
     fp32=75, tf32=1125, bf16=2250, fp16=2250, fp8=4500, int8=187.5, fp4=13500)
_add("gb300", "NVIDIA", 288, 284208, 8000, NVLINK5, NVIDIA + "GB300 NVL72, one GPU of a superchip's two",
     "rates but fp4's are halves of those printed with sparsity; two dies, one device to programs; " + RECALLED,
     fp32=80, tf32=1250, bf16=2500, fp16=2500, fp8=5000, int8=166.7, fp4=15000)
_add("rtx-pro-6000", "NVIDIA", 96, 97887, 1792, PCIE5, PRO + "RTX PRO 6000 Workstation Edition", RECALLED,
     fp32=126, tf32=251.9, bf16=503.8, fp16=503.8, fp8=1007.6, int8=1007.6, fp4=2015.2)
_add("rtx-pro-6000-max-q", "NVIDIA", 96, 97887, 1792, PCIE5, PRO + "RTX PRO 6000 Max-Q Workstation Edition",
     "rates derived from the sheet's fp32; " + RECALLED,
     fp32=110, tf32=220, bf16=440, fp16=440, fp8=880, int8=880, fp4=1760)
_add("rtx-pro-6000-server", "NVIDIA", 96, 97887, 1597, PCIE5, NVIDIA + "RTX PRO 6000 Blackwell Server Edition",
     "rates derived from the sheet's fp32; " + RECALLED,
     fp32=120, tf32=240, bf16=480, fp16=480, fp8=960, int8=960, fp4=1920)
_add("dgx-spark", "NVIDIA", 128, None, 273, ("ConnectX-7, 200 Gb/s", 25), NVIDIA + "DGX Spark (GB10)",
     "the sheet has fp4 with sparsity, 1 PFLOP/s: the other rates are derived from it; nvidia-smi reports no memory; "
     + RECALLED, fp32=31, tf32=62.5, bf16=125, fp16=125, fp8=250, int8=250, fp4=500)

_add("rtx-3060", "NVIDIA", 12, 12288, 360, PCIE4, AMPERE + "RTX 3060", RECALLED,
     fp32=12.7, tf32=12.7, bf16=25.5, fp16=25.5, int8=102, int4=204)
_add("rtx-3090", "NVIDIA", 24, 24576, 936, PCIE4, AMPERE + "RTX 3090", RECALLED,
     fp32=35.6, tf32=35.6, bf16=71, fp16=71, int8=284, int4=568)
_add("rtx-3090-ti", "NVIDIA", 24, 24564, 1008, PCIE4, AMPERE + "RTX 3090 Ti", RECALLED,
     fp32=40, tf32=40, bf16=80, fp16=80, int8=320, int4=640)
_add("rtx-4060", "NVIDIA", 8, 8188, 272, PCIE4_8, ADA + "RTX 4060", RECALLED,
     fp32=15.1, tf32=15.1, bf16=30.2, fp16=30.2, fp8=60.5, int8=121, int4=242)
_add("rtx-4070", "NVIDIA", 12, 12282, 504, PCIE4, ADA + "RTX 4070", RECALLED,
     fp32=29.1, tf32=29.1, bf16=58.3, fp16=58.3, fp8=116.6, int8=233.2, int4=466.4)
_add("rtx-4080", "NVIDIA", 16, 16376, 717, PCIE4, ADA + "RTX 4080", RECALLED,
     fp32=48.7, tf32=48.7, bf16=97.5, fp16=97.5, fp8=194.9, int8=389.9, int4=779.8)
_add("rtx-4090", "NVIDIA", 24, 24564, 1008, PCIE4, ADA + "RTX 4090",
     fp32=82.6, tf32=82.6, bf16=165.2, fp16=165.2, fp8=330.3, int8=660.6, int4=1321.2)
_add("rtx-5060", "NVIDIA", 8, 8151, 448, PCIE5_8, BLACKWELL + "RTX 5060", "derived: 30 SMs of 128 at 2.497 GHz",
     fp32=19.2, tf32=19.2, bf16=38.4, fp16=38.4, fp8=76.7, int8=153.4, fp4=306.8)
_add("rtx-5060-ti-16gb", "NVIDIA", 16, 16311, 448, PCIE5_8, BLACKWELL + "RTX 5060 Ti",
     "derived: 36 SMs of 128 at 2.572 GHz", fp32=23.7, tf32=23.7, bf16=47.4, fp16=47.4, fp8=94.8, int8=189.6, fp4=379.3)
_add("rtx-5070", "NVIDIA", 12, 12227, 672, PCIE5, BLACKWELL + "RTX 5070", RECALLED,
     fp32=30.9, tf32=30.9, bf16=61.7, fp16=61.7, fp8=123.5, int8=246.9, fp4=493.9)
_add("rtx-5070-ti", "NVIDIA", 16, 16303, 896, PCIE5, BLACKWELL + "RTX 5070 Ti", RECALLED,
     fp32=43.9, tf32=43.9, bf16=87.9, fp16=87.9, fp8=175.8, int8=351.5, fp4=703)
_add("rtx-5080", "NVIDIA", 16, 16303, 960, PCIE5, BLACKWELL + "RTX 5080", RECALLED,
     fp32=56.3, tf32=56.3, bf16=112.6, fp16=112.6, fp8=225.1, int8=450.2, fp4=900.4)
_add("rtx-5090", "NVIDIA", 32, 32607, 1792, PCIE5, BLACKWELL + "RTX 5090",
     fp32=104.8, tf32=104.8, bf16=209.5, fp16=209.5, fp8=419, int8=838, fp4=1676)

_add("mi250x", "AMD", 64, 65520, 1638.4, ("Infinity Fabric", 200), AMD + "MI250X, one of its two dies",
     "programs see two devices, and this is one of them: half of the sheet's figures; fp32 is the matrix rate; link: "
     "four of 50 GB/s out of the module, as many to the other die; " + RECALLED,
     fp32=47.9, bf16=191.5, fp16=191.5, int8=191.5)
_MI300 = {"fp32": 163.4, "tf32": 653.7, "bf16": 1307.4, "fp16": 1307.4, "fp8": 2614.9, "int8": 2614.9}
_add("mi300x", "AMD", 192, 196592, 5300, ("Infinity Fabric", 448), AMD + "MI300X",
     "link: seven of 64 GB/s", **_MI300)
_add("mi325x", "AMD", 256, 262128, 6000, ("Infinity Fabric", 448), AMD + "MI325X",
     "link: seven of 64 GB/s", **_MI300)
_add("mi350x", "AMD", 288, 294896, 8000, ("Infinity Fabric", 537.6), AMD + "MI350X",
     "link: seven of 76.8 GB/s; " + RECALLED,
     fp32=144.2, bf16=2306.9, fp16=2306.9, fp8=4613.7, int8=4613.7, fp4=9227.5)
_add("mi355x", "AMD", 288, 294896, 8000, ("Infinity Fabric", 537.6), AMD + "MI355X",
     "link: seven of 76.8 GB/s; " + RECALLED,
     fp32=157.3, bf16=2516.6, fp16=2516.6, fp8=5033.2, int8=5033.2, fp4=10066.3)
_add("rx-7900-xtx", "AMD", 24, 24560, 960, PCIE4, "AMD Radeon RX 7900 XTX specifications", RECALLED,
     fp32=61.4, bf16=122.8, fp16=122.8, int8=122.8)
_add("strix-halo", "AMD", 128, 98304, 256, None, "AMD Ryzen AI Max+ 395 (Strix Halo) specifications",
     "reported memory is the most that can be set aside for the GPU, 96 GiB; rates derived: 40 compute units at 2.9 "
     "GHz; " + RECALLED, fp32=29.7, bf16=59.4, fp16=59.4, int8=59.4)

_add("gaudi-2", "Intel", 96, None, 2450, ("24 x 100 GbE", 300), "Intel Gaudi 2 white paper", RECALLED,
     bf16=432, fp16=432, fp8=865)
_add("gaudi-3", "Intel", 128, None, 3700, ("24 x 200 GbE", 600), "Intel Gaudi 3 white paper",
     "bf16 and fp8 have one and the same rate", bf16=1835, fp16=1835, fp8=1835)

_add("tpu-v4", "Google", 32, None, 1228, ("ICI, 3D torus", 300), GOOGLE + "TPU v4",
     "link: all six together; " + RECALLED, bf16=275, int8=275)
_add("tpu-v5e", "Google", 16, None, 819, ("ICI, 2D torus", 200), GOOGLE + "TPU v5e",
     "link: all four together, half of the bidirectional figure", bf16=197, int8=393)
_add("tpu-v5p", "Google", 95, None, 2765, ("ICI, 3D torus", 600), GOOGLE + "TPU v5p",
     "link: all six together; int8 is twice bf16", bf16=459, int8=918)
_add("tpu-v6e", "Google", 32, None, 1638, ("ICI, 2D torus", 400), GOOGLE + "TPU v6e (Trillium)",
     "link: all four together, half of the bidirectional figure", bf16=918, int8=1836)
_add("tpu-v7", "Google", 96, None, 3690, ("ICI, 3D torus", 300), GOOGLE + "TPU v7 (TPU7x, Ironwood), one of two dies",
     "programs see two devices a chip, and this is one of them: half of the page's figures; link: half of a chip's "
     "1,200 GB/s both ways", bf16=1153.5, fp8=2307)
_add("trainium-2", "Amazon", 96, None, 2900, ("NeuronLink-v3", 640), "AWS Neuron documentation, Trainium 2",
     "a chip of eight cores, which programs see as four or eight; link: half of the page's 1.28 TB/s; memory is in GiB",
     fp32=181, tf32=667, bf16=667, fp16=667, fp8=1299)

_GPU_CORES = "rates derived from shaders and clock; reported memory is what Metal recommends for the GPU"
_add("m1", "Apple", 16, 10923, 68.25, None, APPLE + "M1, 8 GPU cores", _GPU_CORES, fp32=2.6, bf16=2.6, fp16=2.6)
_add("m2-ultra", "Apple", 192, 147456, 800, None, APPLE + "M2 Ultra, 76 GPU cores", _GPU_CORES,
     fp32=27.2, bf16=27.2, fp16=27.2)
_add("m3-max", "Apple", 128, 98304, 400, None, APPLE + "M3 Max, 40 GPU cores", _GPU_CORES,
     fp32=14.3, bf16=14.3, fp16=14.3)
_add("m3-ultra", "Apple", 512, 393216, 819, None, APPLE + "M3 Ultra, 80 GPU cores", _GPU_CORES,
     fp32=28.6, bf16=28.6, fp16=28.6)
_add("m4", "Apple", 32, 21845, 120, None, APPLE + "M4, 10 GPU cores", _GPU_CORES, fp32=3.8, bf16=3.8, fp16=3.8)
_add("m4-pro", "Apple", 64, 49152, 273, None, APPLE + "M4 Pro, 20 GPU cores", _GPU_CORES,
     fp32=8.6, bf16=8.6, fp16=8.6)
_add("m4-max", "Apple", 128, 98304, 546, None, APPLE + "M4 Max, 40 GPU cores", _GPU_CORES,
     fp32=17.2, bf16=17.2, fp16=17.2)
_add("m5", "Apple", 32, 21845, 153.6, None, APPLE + "M5, 10 GPU cores",
     "16-bit rates: four times an M4's, as Apple has it of its Neural Accelerators; fp32 derived, at 1.6 GHz; "
     "reported memory is what Metal recommends for the GPU; " + RECALLED, fp32=4.1, bf16=15.2, fp16=15.2)

_add("epyc-9654", "AMD", 768, None, 460.8, None, "CPU: AMD EPYC 9654 product page, twelve channels of DDR5-4800",
     "memory is twelve modules of 64 GB; rates derived: 96 cores at 2.4 GHz, 32 fp32 and 64 bf16 operations a cycle",
     fp32=7.4, bf16=14.7)
_add("xeon-8480", "Intel", 512, None, 307.2, None, "CPU: Intel Xeon 8480+ product page, eight channels of DDR5-4800",
     "memory is eight modules of 64 GB; rates derived: 56 cores at 2.0 GHz, 64 fp32, and with AMX 2,048 bf16 and 4,096 "
     "int8 operations a cycle", fp32=7.2, bf16=229, int8=459)
_add("cpu-2core", "generic", 8, None, 20, None, "CPU: two cores of a rented server",
     "an assumption: no such machine has a data sheet; `this` is the measured one", fp32=0.15, bf16=0.15)
# fmt: on


def names() -> list[str]:
    """Returns the names of all rows."""
    return list(MACHINES)


# What nvidia-smi, lspci, rocm-smi and JAX call a machine, where that is not the row's name with a maker before it.
PRINTED = {
    "v100-sxm2-16gb": "v100-16gb",
    "v100-sxm2-32gb": "v100-32gb",
    "v100-sxm3-32gb": "v100-32gb",
    "a100-sxm-40gb": "a100-40gb",
    "a100-sxm4-40gb": "a100-40gb",
    "a100-sxm-80gb": "a100-80gb",
    "a100-sxm4-80gb": "a100-80gb",
    "a100-pcie-80gb": "a100-80gb-pcie",
    "a30-pcie": "a30",
    "h100-80gb-hbm2e": "h100-pcie",
    "h100-80gb-hbm3": "h100-sxm",
    "h100-sxm5-80gb": "h100-sxm",
    "h100-sxm5": "h100-sxm",
    "h200-sxm-141gb": "h200",
    "gh200-120gb-/-480gb": "gh200-96gb",
    "h800-sxm": "h800",
    "h800-sxm5-80gb": "h800",
    "b300-sxm6-ac": "b300",
    "rtx-a6000": "a6000",
    "rtx-pro-6000-blackwell": "rtx-pro-6000",
    "rtx-pro-6000-blackwell-workstation-edition": "rtx-pro-6000",
    "rtx-pro-6000-blackwell-max-q-workstation-edition": "rtx-pro-6000-max-q",
    "rtx-pro-6000-blackwell-server-edition": "rtx-pro-6000-server",
    "gb10": "dgx-spark",
    "gh200-120gb": "gh200-96gb",  # named by the processor's memory
    "gh200-480gb": "gh200-96gb",
    "rtx-6000-ada-generation": "rtx-6000-ada",
    "mi250x/mi250": "mi250x",
    "mi300x-oam": "mi300x",
    "mi325x-oam": "mi325x",
    "tpu-v5-lite": "tpu-v5e",
    "radeon-8060s": "strix-halo",
    "radeon-8060s-graphics": "strix-halo",
    "8060s": "strix-halo",
    "8060s-graphics": "strix-halo",
    "ryzen-ai-max+-395": "strix-halo",
    "graphics-/-radeon-8050s-graphics-/-radeon-8060s-graphics": "strix-halo",
    "rx-7900-xt/7900-xtx/7900-gre/7900m": "rx-7900-xtx",
    "tpu-v6-lite": "tpu-v6e",
    "tpu-7x": "tpu-v7",
    "tpu7x": "tpu-v7",
    "trainium2": "trainium-2",
    "trn2": "trainium-2",
}
MAKERS = ("nvidia", "amd", "apple", "google", "intel", "amazon", "aws", "geforce", "tesla", "instinct", "radeon")
# In a line of lspci the name is the last bracket that is no class, no numbers and no maker.
BRACKET = re.compile(r"\[([^\[\]]+)\]")
CHANGED = re.compile(r"([^=]*?),([^,=]*=.*)", re.DOTALL)  # a name and numbers; a name of lspci has commas
NO_NAME = re.compile(r"[0-9a-f]{4}(:[0-9a-f]{4})?|amd(/ati)?")


def find(name: str) -> Machine:
    """Returns the row of that name, or of the name that nvidia-smi and its like print: "NVIDIA H100 80GB HBM3".

    `h100-sxm-3g.40gb` and "NVIDIA H100 80GB HBM3 MIG 3g.40gb" are MIG slices. A line of lspci has it in brackets. Case,
    blanks, `_` for `-`, and makers and brands before it are forgiven. Raises InputError with the nearest names where
    there is none.
    """
    plain = re.sub(r"^\s*gpu\s+\d+\s*:|\(uuid:[^)]*\)\s*$", "", name.strip().lower())  # a line of nvidia-smi -L
    bracketed = [found for found in BRACKET.findall(plain[:400]) if not NO_NAME.fullmatch(found)]
    plain = re.sub(r"[_\s]+", "-", (bracketed[-1] if bracketed else plain).strip())
    while (maker := plain.partition("-")[0]) in MAKERS:
        plain = plain[len(maker) + 1 :]
    if (part := slices.split_name(plain)) is not None:
        return slices.sliced(find(part[0]), part[1])
    plain = PRINTED.get(plain, plain)
    if plain not in MACHINES:
        starts = [known for known in MACHINES if plain and known.startswith(plain)]
        hint = f"did you mean {' or '.join(map(repr, starts))}?" if starts else near(plain[:80], MACHINES)
        allowed = "a name, a TOML file, numbers such as memory=80GB,bandwidth=2TB/s,bf16=312T, or `this`"
        raise InputError(
            "unknown machine", field="gpu", value=name, allowed=allowed, fix=hint or "`asbuilt machines` lists them"
        )
    return MACHINES[plain]


def resolve(text: str) -> Machine:
    """Returns the machine given by `text`: a name, a TOML file, numbers, or a name with other numbers.

    The last is `h100-sxm,bf16=990T`. `this`, the measured machine, is found by `asbuilt.measure.this_machine`, which
    runs it. Raises InputError for anything else.
    """
    if found := CHANGED.fullmatch(text):
        return with_numbers(resolve(found[1]), found[2])
    if "=" in text:
        return parse_numbers(text)
    if text.lower().endswith(".toml"):
        return read_toml(Path(text))
    return find(text)
