"""The block formats of GGUF files whose codes are looked up in a table: IQ, ternary and NVFP4, and all others.

A code of the IQ formats below four bits names a point of a grid in eight dimensions (four at three bits), scaled by its
group and, from two bits on, with the signs apart. Which points a grid has was once chosen by how often weights come
near them, so the tables cannot be derived; sorted, they take a byte or two each. Layouts and tables are those of
ggml-common.h and ggml-quants.c; every product of scales here is exact in float32, so all numbers are theirs bit by bit.

Shapes: blocks n, groups of a block g, points of a group p, numbers of a point w.
"""

from __future__ import annotations

import functools
import zlib
from base64 import b85decode
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from asbuilt.dtypes import BLOCKS, FP4
from asbuilt.kernels import blocks as of_numbers
from asbuilt.kernels.blocks import DOUBLED_FP4, aligned, halves
from asbuilt.kernels.dequantise import TILE


@dataclass(frozen=True)
class Grid:
    """Points of `width` numbers out of `levels`.

    `packed` are the points, each read as a number whose digits are the places of its levels, the lowest first: sorted,
    as differences, 255 for each whole 255 of one, compressed.
    """

    levels: tuple[int, ...]
    width: int
    packed: bytes

    def points(self) -> Tensor:
        """Returns all points (N, width) in float32."""
        base, code, rest, codes = len(self.levels), 0, 0, []
        for byte in zlib.decompress(b85decode(self.packed)):
            rest += byte
            if byte < 255:
                code, rest = code + rest, 0
                codes.append(code)
        places = base ** torch.arange(self.width)
        digits = torch.tensor(codes)[:, None] // places % base
        return torch.tensor(self.levels, dtype=torch.float32)[digits]


GRIDS = {
    "iq2_xxs": Grid(
        (8, 25, 43),
        8,
        b"c-kdTL2AQ53@l<18zD>(%d(hdF=h$I1Y=ANrudLU2*rmIaws|GB|Y{5eM{fc?<Cq*hmn{WG13eC6@n><MkizoXsW~vl50RJDl2m7l>-V"
        b"ONs5<?--j^MS$$Sm_mIWXNRx`}`lhW;fD&tS8uoyGYhkh@T$HQ2=<b2X&%=K(TB9K%(VAd`rG%Wfo|dbUX6g;ijfNs*4E1onKv;J@VY4"
        b"jnC?R!o%H{)xuU|kHBlGdCd?C4My_4Pbw(9+Z?_MWIx1arY>(hFFY{n;%BpCw",
    ),
    "iq2_xs": Grid(
        (8, 25, 43),
        8,
        b"c-mc%!D_=W42Fj=LI`7w5GD*0f+-=45K1XIj2?Q}X^fr6PCM<mXW1i9PS-4}!M3oZU!VUw*eti+xSS67FL`-Fv@MsA0bL-yX#&UF3Z@J"
        b"g9OUL##-WLLAqyp=3XYC%BydTt65=6PEV8>kIq+z*GW)c*p6E5X>FME0T6?4(7&|SEwM3XRcRrqMIwuW}zVW?-|Lj+~&14tJQUT`G52J"
        b"~I9!I8xQ!ODXtTyR&V^FTvz_C448WI-5Jq}$WAE{)9uciu-SNIHV3@_rwx8vblsB8^L3!5<Z_VtJhWss=tq<zMi7!rLHB(5VvY&1Wsx_"
        b"iWP599mLpSoRTrfI@r^qOTie5;y&d&C(g=;IGd78#)",
    ),
    "iq2_s": Grid(
        (8, 25, 43),
        8,
        b"c-nna!D_=W3>`)YVT=(bgiyjLVT4jf4<+QV<Gx|vutWd<1180>W2fl?O=U}cdhbbnGsOc>-w3cJF{L0LaJ@l_1s(v1b{Ofw;)l5ecGzf"
        b"FpcrGw9ZMQOKH>qzLJHPMXa~17hguKRt!t6Xo0X49k`I@iUy!UXFl5T7q>WOt%T?T34E|E85(q+qs7Rf}2t!WkbcRdE_su-?a^f*^J_%"
        b"|3YF+P4b09QM0im3v$)1$>dX2D=f9ct?6)GTXL|aTQu6b8xy_eT~ym;$O{&AX3f0W*$UJaV_nXH;M^R>zA5k*#<*bA>SK>-qoJ%5YAm&"
        b"TobK53l?U|K?4mZ#z^>~y*k+!9GT;z*5_&T)VvnXa8$;{ruIEM+exG)j1forhPTGY=|vG6Ot<{t<PZM(o=GWs}}P7YW1Qk$)$?-<sZ71"
        b"0T&F)7KfH",
    ),
    "iq3_xxs": Grid(
        (4, 12, 20, 28, 36, 44, 52, 62),
        4,
        b"c-kF}K~ID*6ol>Y=mSb06<WIncY$3=(2yAM>`lE9|Np<Sc$j2nGWq5X$UzERK7x{E%D|>BQq5pcrG>PDxph7_HAr{vBYHv*cdV0O)CtU"
        b"ZJ2GE2q_ob^ZK1ZScNzajl$8UJ(A<+MzzJ!U^-L>Ga`ILG4HKV^$6)gVVbCMD!8Pq?(`jAzLmQUhji9F8H_GYz%P^Zs!k$647z^#<AY<"
        b"`zPTxiRU1f8S^LUw`_0KfFFR}rub!+w7=MPrG<OZ}~fB7vBnE",
    ),
    "iq3_s": Grid(
        (1, 3, 5, 7, 9, 11, 13, 15),
        4,
        b"c-keA+fKtk3`E)SE%DwGn$m`XR8*u2-Vy)*XL!rgt}T1!*nUchkWvDWSOpXxff0=yCnjRBRTfQ*L=h6}D5^9m6AYw`3Z~5QRnqP#h<Zk"
        b"sOlWI2JTjHHhvu*f2Q<*EDI8gh)X)@8gF?y42SVs2mQ`~gRalT5AC>*iRB;)gg;$;aB{8HzdAv2IA}9_1=r|KO#Ng~P5Ai%&wPl^jh<7"
        b"rXYsz(k_#1Crk>%Bfpp9)1TqnQ+VsVZjCftoB+-9)0Nri1yt`>dn^>DZbZob7N;cvFMM7K(W8${TplNK2ae8Y22dx3xK>voo$b=Q!Lz7"
        b"p36=J~3#i`J8*UZuoxikHuF!0#39cWm~!EcX8LtXXs_(tlcSv~S1D7k-%LC@8vE?syxQvvogHdx=w@znAOj{s-R}55W",
    ),
    "iq1_s": Grid(
        (-1, 0, 1),
        8,
        b"c-n1M*Mi$H3@e8yd1Umx|Nor@NGW!%)#YqagA<^CDTg(6ZJ|1H!iNh)l@?Bc)Bd&JA{v(QGvn*PW<<El3ojKJSWt+9xz^Z>Pl!)HmFi7"
        b"gaoCSbtKUtiH;EyJ$%*4}w{CD6BgI|vq^7fCINL0yQ7i?#;D9g&48Ivj%cvY)({reVqvp-hTRgCfRV(+g!-Y>In6=a>b5UwCqs{o!p4T"
        b"?CiYYhYw+=sjL^)UcNW%W4Xgy7*9`|9TW9wb}42KzW+ba`HK&9dm5pNfd@{)0)QlAq0T|$XsRH&HXqS?vfRTi<jGyWX71VgwhEW+4tHQ"
        b"KWR%%s6ICy^I$L)KOrZucsmUW(st07<4I6Q<K~KyQ{0YUIcwL6iH|_Bd^eRfTzo$HHV~)aRRd%+zD&lUZs;&aSJLl_Z?$OxgkzdYjOX3"
        b"<%o!m&dZMg@!~YtHog6tUb1$dlZI}B3^bw3BJVq#LM(bKVm7(o3Y|>>L-`x#@3QJn?%L7NG0_@pXmsf5&Lph?vP#9<TG@cw<Xv*sT02I"
        b"w3*yT5hQ2kyhL_n<h_-5rKcpn>J;&B=!TIiF|4~d6ITYaR=u1$6TIP*lJ-bKA#HFJgn)%eI+Mh}+93|4+XKjZk?86dlT#nM%<@ycdXqj"
        b"Ef;4S*%q=e?z6O9#>QsWj-NkoPdm*%>0w{xy7L$)AGI8!k9c)%Ej|mj9-mRKg5lntGy~3iGN#ruv1Fr*UqnGeN%j_hvquWNpsNzlrT%A"
        b"nEvzjnmV_mF8Psmk=B)TIzeEC4LBUWqGegEO$<3@6nFp|(imhX#kd^agTkL1jZEynZ;)zza?I(*F9;D-&~iiw~CjOhPxq`ody4+At?f{"
        b"92D#NsRnfwZ%!dcs&X`aCXlEQhOoSTP(uaN9<GUQUAe@l~bkgO>D^mljRYD-D&w$JBo|#ovfNY<(=^&&<MX1hLq!Z-!w*lOzUgyCm`^X"
        b"pS%I11&uUn}{CmaUJ=1`xnWK8KD",
    ),
}
GRIDS["iq1_m"] = GRIDS["iq1_s"]
# The sixteen numbers of IQ4: closer together around 0, where weights are.
NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
OFFSET = 0.125  # what all numbers of a point of IQ1 are shifted by, up or down


def expand(raw: Tensor, format: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns the numbers, flat, of blocks of any format that lie one after the other; a tile at a time in float32."""
    size, nbytes = BLOCKS[format]
    blocks = raw.reshape(-1, nbytes)
    of = EXPANDED.get(format) or of_numbers.EXPANDED[format]
    if 0 < len(blocks) * size <= TILE:
        return of(blocks).flatten().to(dtype)
    made = torch.empty((len(blocks), size), dtype=dtype, device=raw.device)
    step = max(1, TILE // size)
    for start in range(0, len(blocks), step):
        made[start : start + step] = of(blocks[start : start + step])
    return made.flatten()


@functools.cache
def _points(format: str) -> Tensor:
    return GRIDS[format].points()


@functools.cache
def _signs() -> Tensor:
    """Returns the signs (256, 8) of the bits of a byte, the lowest first: 1 is negative."""
    return 1 - 2 * ((torch.arange(256)[:, None] >> torch.arange(8)) & 1).float()


@functools.cache
def _even_signs() -> Tensor:
    """Returns the signs (128, 8) of seven bits and an eighth that makes the negative ones even in number."""
    seven = _signs()[:128]
    return torch.cat((seven[:, :7], seven[:, :7].prod(1, keepdim=True)), 1)


def _of(table: Tensor, index: Tensor) -> Tensor:
    """Returns rows (*index.shape, w) of a table (N, w)."""
    return table.to(index.device).index_select(0, index.flatten().int()).view(*index.shape, -1)


def _words(raw: Tensor, bits: int) -> Tensor:
    """Returns whole numbers of 16 or 32 bits, little-endian, that are not negative."""
    places = 1 << torch.arange(0, bits, 8, device=raw.device, dtype=torch.int64)
    return (raw.unflatten(-1, (-1, bits // 8)) * places).sum(-1)


def _fields(words: Tensor, shifts: tuple[int, ...], mask: int) -> Tensor:
    """Returns (..., k len(shifts)) fields of words (..., k): all of the first word, then of the second."""
    return ((words[..., None] >> torch.tensor(shifts, dtype=words.dtype, device=words.device)) & mask).flatten(-2)


def _nibbles(raw: Tensor) -> Tensor:
    """Returns the lower half of each byte, then its upper one."""
    return _fields(raw, (0, 4), 15)


def _scaled(numbers: Tensor, scale: Tensor) -> Tensor:
    """Returns numbers (n, ..., w) times the scale (n, g) of their group, flat per block."""
    return numbers.flatten(1).unflatten(1, (scale.shape[1], -1)).mul_(scale[..., None]).flatten(1)


SEVENS = (0, 7, 14, 21)


def _iq2_xxs(raw: Tensor) -> Tensor:
    groups = raw[:, 2:].unflatten(1, (8, 8))
    words = _words(groups[..., 4:], 32).flatten(1)
    numbers = _of(_points("iq2_xxs"), groups[..., :4].flatten(1)) * _of(_even_signs(), _fields(words, SEVENS, 127))
    return _scaled(numbers, halves(raw[:, :2]) * (0.5 + (words >> 28).float()) * 0.25)


def _iq2_xs(raw: Tensor) -> Tensor:
    words = _words(raw[:, 2:66], 16)
    numbers = _of(_points("iq2_xs"), words & 511) * _of(_even_signs(), words >> 9)
    return _scaled(numbers, halves(raw[:, :2]) * (0.5 + _nibbles(raw[:, 66:]).float()) * 0.25)


def _iq2_s(raw: Tensor) -> Tensor:
    index = raw[:, 2:34].int() | _fields(raw[:, 66:74], (0, 2, 4, 6), 3).int() << 8
    numbers = _of(_points("iq2_s"), index) * _of(_signs(), raw[:, 34:66])
    return _scaled(numbers, halves(raw[:, :2]) * (0.5 + _nibbles(raw[:, 74:]).float()) * 0.25)


def _iq3_xxs(raw: Tensor) -> Tensor:
    words = _words(raw[:, 66:], 32)
    numbers = _of(_points("iq3_xxs"), raw[:, 2:66]).flatten(1)
    signed = numbers * _of(_even_signs(), _fields(words, SEVENS, 127)).flatten(1)
    return _scaled(signed, halves(raw[:, :2]) * (0.5 + (words >> 28).float()) * 0.5)


def _iq3_s(raw: Tensor) -> Tensor:
    index = raw[:, 2:66].int() | _fields(raw[:, 66:74], tuple(range(8)), 1).int() << 8
    signed = _of(_points("iq3_s"), index).flatten(1) * _of(_signs(), raw[:, 74:106]).flatten(1)
    return _scaled(signed, halves(raw[:, :2]) * (1 + 2 * _nibbles(raw[:, 106:]).float()))


def _iq1_s(raw: Tensor) -> Tensor:
    words = _words(raw[:, 34:], 16)
    points = _of(_points("iq1_s"), raw[:, 2:34].int() | _fields(words, (0, 3, 6, 9), 7).int() << 8)
    shifted = points.unflatten(1, (8, 4)) + _shift(words >> 15)
    return _scaled(shifted, halves(raw[:, :2]) * (2 * ((words >> 12) & 7) + 1).float())


def _iq1_m(raw: Tensor) -> Tensor:
    words, d = _words(raw[:, 48:], 16), scale_of_iq1_m(raw)
    points = _of(_points("iq1_m"), raw[:, :32].int() | _fields(raw[:, 32:48], (0, 4), 7).int() << 8)
    return _scaled(
        points.unsqueeze(2) + _shift(_fields(raw[:, 32:48], (3, 7), 1)),
        d * (2 * _fields(words, (0, 3, 6, 9), 7) + 1).float(),
    )


def scale_of_iq1_m(raw: Tensor) -> Tensor:
    """Returns the scales (n, 1) of blocks of IQ1_M, float16 in four pieces."""
    pieces = _fields(_words(raw[:, 48:], 16), (12,), 15)
    step = (pieces << torch.arange(0, 16, 4, device=raw.device)).sum(-1, keepdim=True)
    return step.to(torch.int32).to(torch.int16).view(torch.float16).float()


def _shift(negative: Tensor) -> Tensor:
    """Returns (n, k, 1, 1) shifts of bits (n, k)."""
    return (OFFSET - 2 * OFFSET * negative.float())[..., None, None]


def _halves_of(raw: Tensor, width: int) -> Tensor:
    """Returns the lower halves of every `width` bytes, then their upper ones."""
    return torch.cat((raw.unflatten(1, (-1, width)) & 15, raw.unflatten(1, (-1, width)) >> 4), -1)


def _looked_up(numbers: tuple[float, ...], codes: Tensor) -> Tensor:
    return _of(torch.tensor(numbers, dtype=torch.float32)[:, None], codes)[..., 0]


def _iq4_nl(raw: Tensor) -> Tensor:
    return _scaled(_looked_up(NONLINEAR, _halves_of(raw[:, 2:], 16)), halves(raw[:, :2]))


def _iq4_xs(raw: Tensor) -> Tensor:
    high = _fields(_words(raw[:, 2:4], 16), tuple(range(0, 16, 2)), 3)
    scales = (_nibbles(raw[:, 4:8]) | high << 4).float() - 32
    return _scaled(_looked_up(NONLINEAR, _halves_of(raw[:, 8:], 16)), halves(raw[:, :2]) * scales)


POWERS = (1, 3, 9, 27, 81)


def _thirds(raw: Tensor, n: int) -> Tensor:
    """Returns the first `n` ternary digits of bytes (..., w) less one, (..., n w): each digit of all bytes in turn.

    A byte is its five digits as a fraction of 256, rounded up: times 3^k, the fraction's next digit is the whole part
    of its triple.
    """
    powers = torch.tensor(POWERS[:n], dtype=torch.uint8, device=raw.device)[:, None]
    fraction = raw[..., None, :] * powers  # wraps at 256
    return ((fraction.int() * 3 >> 8) - 1).float().flatten(-2)


def _tq1_0(raw: Tensor) -> Tensor:
    parts = (_thirds(raw[:, :32], 5), _thirds(raw[:, 32:48], 5), _thirds(raw[:, 48:52], 4))
    return torch.cat(parts, 1).mul_(halves(raw[:, 52:]))


def _tq2_0(raw: Tensor) -> Tensor:
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=raw.device)[:, None]
    codes = (raw[:, :64].unflatten(1, (2, 1, 32)) >> shifts) & 3
    return codes.flatten(1).float().sub_(1).mul_(halves(raw[:, 64:]))


def _nvfp4(raw: Tensor) -> Tensor:
    """E4M3 scales without a sign, of which ggml reads NaN as 0; the codes are doubled, the scales half as large."""
    scale = (raw[:, :4] & 127).view(torch.float8_e4m3fn).float() * 0.5
    scale = torch.where(raw[:, :4] == 127, 0.0, torch.where(raw[:, :4] == 255, 240.0, scale))
    return _scaled(_looked_up(DOUBLED_FP4, _halves_of(raw[:, 4:], 8)), scale)


def _nvfp4_wide(raw: Tensor) -> Tensor:
    """A float32, which multiplies the four E4M3 scales, before them."""
    scale = raw[:, 4:8].view(torch.float8_e4m3fn).float() * aligned(raw[:, :4]).view(torch.float32)
    return _scaled(_looked_up(FP4, _halves_of(raw[:, 8:], 8)), scale)


EXPANDED: dict[str, Callable[[Tensor], Tensor]] = {
    "iq1_s": _iq1_s,
    "iq1_m": _iq1_m,
    "iq2_xxs": _iq2_xxs,
    "iq2_xs": _iq2_xs,
    "iq2_s": _iq2_s,
    "iq3_xxs": _iq3_xxs,
    "iq3_s": _iq3_s,
    "iq4_nl": _iq4_nl,
    "iq4_xs": _iq4_xs,
    "tq1_0": _tq1_0,
    "tq2_0": _tq2_0,
    "nvfp4": _nvfp4,
    "nvfp4_wide": _nvfp4_wide,
}
