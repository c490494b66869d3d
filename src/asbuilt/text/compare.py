"""Bytes per token of several tokenizers, by kind of text: prose, code, digits, and scripts other than Latin.

The samples are short, written for this purpose, and show tendencies: a comparison for a purpose needs texts of that
purpose.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from asbuilt.errors import InputError
from asbuilt.text.tokenizer import Tokenizer

PROSE = """\
A language model does not read letters. Before it sees a sentence, a tokenizer cuts the sentence into pieces that were
frequent in some older text, and the model learns a vector for each of them. Common words are one piece; rare ones,
names and misspellings become several. It's a trade: with more pieces in the vocabulary a text takes fewer steps, but
the tables at both ends of the model grow, and the last pieces to be added are so rare that little is learned of them.
"""
CODE = '''\
from collections import Counter


class Inventory:
    """Counts of items by name."""

    def __init__(self, items=()):
        self.counts = Counter(items)

    def take(self, name, number=1):
        if self.counts[name] < number:
            raise KeyError(f"only {self.counts[name]} of {name!r} left")
        self.counts[name] -= number
        return [name for _ in range(number)]


if __name__ == "__main__":
    stock = Inventory(["bolt"] * 12 + ["nut"] * 7)
    for i in range(3):
        print(i, stock.take("bolt", number=i + 1), sum(stock.counts.values()))
'''
DIGITS = """\
1047 28 3.14159 2026-12-02 09:15:30 192.168.10.254 1,299,709 0.0625 65536 1e-5
4421 9973 27182818 100000 77.25% 8,589,934,592 555-0142 12/31/1999 2048x1536 -273.15
6.02214076e23 314 159 265 358 979 323 846 264 338 327 950 288 419 716 939 937 510
"""
SCRIPTS = {
    "cyrillic": "Вода кипит при ста градусах. Высоко в горах она кипит раньше, и суп приходится варить дольше.",
    "greek": "Το νερό βράζει στους εκατό βαθμούς. Ψηλά στα βουνά βράζει νωρίτερα και το φαγητό θέλει περισσότερη ώρα.",
    "arabic": "يغلي الماء عند مئة درجة. في الجبال العالية يغلي قبل ذلك، ولهذا يحتاج الطعام إلى وقت أطول.",
    "hebrew": "המים רותחים במאה מעלות. בהרים הגבוהים הם רותחים מוקדם יותר, ולכן הבישול לוקח זמן רב יותר.",
    "devanagari": "पानी सौ डिग्री पर उबलता है। ऊँचे पहाड़ों पर वह जल्दी उबलता है, इसलिए खाना पकने में अधिक समय लगता है।",
    "telugu": "నీరు వంద డిగ్రీల వద్ద మరుగుతుంది. ఎత్తైన కొండల మీద నీరు ముందుగా మరుగుతుంది, అందుకే వంటకు ఎక్కువ సమయం పడుతుంది.",
    "thai": "น้ำเดือดที่หนึ่งร้อยองศา บนภูเขาสูงน้ำเดือดเร็วกว่า จึงต้องใช้เวลาทำอาหารนานขึ้น",
    "chinese": "水在一百度时沸腾。在高山上，水更早沸腾，所以做饭需要更长的时间。",
    "japanese": "水は百度で沸騰します。高い山の上ではもっと早く沸騰するので、料理に時間がかかります。",
    "korean": "물은 백 도에서 끓는다. 높은 산에서는 더 일찍 끓기 때문에 음식을 익히는 데 시간이 더 걸린다.",
}
SAMPLES: dict[str, str] = {"prose": PROSE, "code": CODE, "digits": DIGITS, **SCRIPTS}


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One kind of text: its size, and how many tokens each tokenizer makes of it."""

    kind: str
    bytes: int
    characters: int
    tokens: tuple[int, ...]

    @property
    def bytes_per_token(self) -> tuple[float, ...]:
        """UTF-8 bytes of the text for each of its tokens: higher is shorter."""
        return tuple(self.bytes / tokens for tokens in self.tokens)

    @property
    def change(self) -> tuple[float, ...]:
        """How many more tokens than the first tokenizer makes, as a share: -0.31 is 31% fewer."""
        return tuple(tokens / self.tokens[0] - 1 for tokens in self.tokens)


def compare(tokenizers: list[Tokenizer], texts: Mapping[str, str] = SAMPLES) -> list[Compared]:
    """Returns a row for each text; the tokens are those of the text alone, without special tokens around it."""
    rows = []
    for kind, text in texts.items():
        if not text:
            raise InputError("empty", field=kind, allowed="a text to compare on")
        made = [len(tokenizer.encode(text)) for tokenizer in tokenizers]
        if not all(made):
            raise InputError("gives no tokens to divide its bytes by", field=kind)
        rows.append(Compared(kind=kind, bytes=len(text.encode()), characters=len(text), tokens=tuple(made)))
    return rows
