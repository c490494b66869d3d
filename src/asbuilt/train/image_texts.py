"""Pairs of an image and a text: read from files, or drawn, and made into batches for contrastive training.

- JSON lines: {"image": FILE, "text": TEXT}, files relative to the folder of the lines;
- a folder: images, and beside each a text of the same name that ends in .txt;
- `drawn:shapes`: coloured shapes on a dark ground and what they are, as "a small red ring at the top left": 720 pairs,
  each combination once. Those that are held out are combinations that training never sees.

Shapes: batch B, tokens T, an image (C, H, W), its side S.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from asbuilt.checkpoint.source import open_model
from asbuilt.errors import InputError
from asbuilt.families import Reading
from asbuilt.files import open_regular, parse_json, read_object, require_regular
from asbuilt.media.image import BICUBIC, CLIP, LARGEST, PREPROCESSOR, Preparation
from asbuilt.spec import Model as ModelSpec
from asbuilt.spec import Projection
from asbuilt.text.sources import JSON_LINES
from asbuilt.text.tokenizer import Tokenizer
from asbuilt.train.batch import IGNORED, ImageTexts
from asbuilt.train.corpus import made_tokenizer, tokenizer_file
from asbuilt.train.data import PairData, shuffled
from asbuilt.train.draws import drawing
from asbuilt.train.recipe import Recipe
from asbuilt.train.text import Vocabulary

DRAWN = "drawn:shapes"
IMAGE = "image"  # the key of a line
IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif")
TEXT = ".txt"
MOST_PAIRS = 1 << 24
MOST_TEXT = 1 << 20  # bytes of the text of an image
BYTES = 255.0
GROUND, NOISE = 30.0, 8.0  # of 255
CHANNELS = 3
MADE = ("characters", "bytes", "bpe")  # tokenizers that are made of the texts
# The model of a recipe, for a tokenizer of so many tokens with this end.
Described = Callable[[Recipe, int, int | None], Reading]

COLOURS = {
    "red": (230, 50, 40),
    "green": (40, 180, 70),
    "blue": (50, 90, 230),
    "yellow": (240, 220, 50),
    "purple": (150, 60, 190),
    "orange": (250, 140, 30),
    "white": (245, 245, 245),
    "grey": (130, 130, 130),
}
SIZES = {"small": 0.09, "large": 0.15}  # half its width, of the image's
PLACES = {
    f"at the {name}".replace("middle centre", "centre"): (row, column)
    for (row, down), (column, across) in product(
        enumerate(("top", "middle", "bottom")), enumerate(("left", "centre", "right"))
    )
    for name in (f"{down} {across}",)
}
FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "circle": lambda y, x: x * x + y * y <= 1,
    "square": lambda y, x: (x.abs() <= 0.85) & (y.abs() <= 0.85),
    "triangle": lambda y, x: (y <= 0.8) & (2 * x.abs() <= y + 1.1),
    "cross": lambda y, x: (x.abs().minimum(y.abs()) <= 0.3) & (x.abs().maximum(y.abs()) <= 1),
    "ring": lambda y, x: (x * x + y * y <= 1) & (x * x + y * y >= 0.35),
}


@dataclass(frozen=True)
class Shape:
    """A drawn image: half its width as a part of the image's side, its colour, its form, and row and column."""

    half: float
    colour: tuple[int, int, int]
    form: Callable[[Tensor, Tensor], Tensor]
    place: tuple[int, int]
    number: int
    """Chooses how place, size and light differ a little from other images, and the noise."""

    def drawn(self, side: int) -> Tensor:
        """Returns the image in bytes, (3, S, S)."""
        generator = drawing(DRAWN, self.number)
        down, right, scale, light = torch.rand(4, generator=generator).tolist()
        at_S = (torch.arange(side) + 0.5) / side
        half = self.half * (0.9 + 0.2 * scale)
        y, x = (
            (at_S - (0.2 + 0.3 * n) - 0.08 * (moved - 0.5)) / half
            for n, moved in zip(self.place, (down, right), strict=True)
        )
        inside = self.form(y[:, None].expand(side, side), x.expand(side, side))
        paint = torch.tensor(self.colour, dtype=torch.float32)[:, None, None] * (0.8 + 0.2 * light)
        image = torch.where(inside, paint, GROUND)
        return (image + NOISE * torch.randn(image.shape, generator=generator)).clamp(0, BYTES).round().to(torch.uint8)


@dataclass(frozen=True)
class ImageText:
    """An image, of a file or drawn, and its text."""

    image: Path | Shape
    text: str


@dataclass(frozen=True)
class Row:
    """An image and the ids of its text, from its opening tokens to its end."""

    image: Path | Tensor
    ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Paired:
    """Makes a batch of rows: pixels as `preparation` says, texts filled with the end token to the longest of them.

    A tower that reads the first end token sees nothing of what follows it, so no mask is needed.
    """

    preparation: Preparation
    end_id: int

    def __call__(self, rows: Sequence[Row]) -> ImageTexts:
        """Returns the batch."""
        longest = max(len(row.ids) for row in rows)
        ids_BT = torch.full((len(rows), longest), self.end_id, dtype=torch.int64)
        targets_BT = torch.full_like(ids_BT, IGNORED)
        for i, row in enumerate(rows):
            ids_BT[i, : len(row.ids)] = targets_BT[i, : len(row.ids)] = torch.tensor(row.ids)
        return ImageTexts(ids=ids_BT, targets=targets_BT, images=torch.stack([self._pixels(row) for row in rows]))

    def _pixels(self, row: Row) -> Tensor:
        if isinstance(row.image, Tensor):
            return self.preparation.scaled(row.image)
        made = self.preparation.of([row.image])
        assert isinstance(made, Tensor)
        return made[0]


def preparation_of(folder: Path | None, side: int) -> Preparation:
    """Returns what a checkpoint's folder does with images, or CLIP's way for squares of `side` pixels.

    Raises InputError for a folder whose images become anything but one square of that size.
    """
    if folder is None or not (folder / PREPROCESSOR).is_file():
        mean, std = CLIP
        return Preparation(mean=mean, std=std, factor=1 / BYTES, resample=BICUBIC, shortest=side, crop=(side, side))
    made = Preparation.read(folder)
    plain = made.cut is None and made.tiling is None
    if not plain or (made.crop or made.size) != (side, side):
        allowed = f"images of {side} x {side} pixels, the model's"
        raise InputError("makes other images", field=str(folder / PREPROCESSOR), allowed=allowed)
    return made


def said_of(made: Preparation) -> dict[str, object]:
    """Returns the preprocessor_config.json of CLIP's way."""
    assert made.crop is not None
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": made.shortest},
        "resample": made.resample,
        "do_center_crop": True,
        "crop_size": {"height": made.crop[0], "width": made.crop[1]},
        "do_rescale": True,
        "rescale_factor": made.factor,
        "do_normalize": True,
        "image_mean": list(made.mean),
        "image_std": list(made.std),
        "do_convert_rgb": True,
    }


def read_image_texts(name: str, key: str) -> list[ImageText]:
    """Returns the pairs of a file, a folder or a name; raises InputError for what is not a pair."""
    path = Path(name)
    if name == DRAWN:
        found = list(drawn_shapes())
    elif path.is_dir():
        found = list(_of_folder(path))
    elif name.endswith(JSON_LINES):
        found = list(_of_lines(path, key))
    else:
        allowed = f"a folder of images with texts, a file that ends in {JSON_LINES}, or {DRAWN}"
        raise InputError("has no pairs of images and texts", field="data.text", value=name, allowed=allowed)
    if not found:
        raise InputError("has no images", field="data.text", value=name)
    return found


def _of_folder(folder: Path) -> Iterator[ImageText]:
    files = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    images = [path for path in files if path.suffix.lower() in IMAGES]
    texts = {path.with_suffix(TEXT) for path in images}
    for path in files:
        if path not in texts and path.suffix.lower() not in IMAGES:
            allowed = f"images ({', '.join(IMAGES)}) and for each a text, NAME{TEXT}"
            raise InputError("neither an image nor the text of one", field=str(path), allowed=allowed)
    if len(texts) < len(images):
        raise InputError("two images have the same name, and so one text", field=str(folder))
    for path in images:
        text = path.with_suffix(TEXT)
        require_regular(text, f"the text of {path.name}")
        with open_regular(text) as file:
            yield ImageText(path, _text(file.read(MOST_TEXT + 1), str(text)))


def _text(raw: bytes, where: str) -> str:
    if len(raw) > MOST_TEXT:
        raise InputError("too long", field=where, allowed=f"at most {MOST_TEXT:,} bytes")
    try:
        said = " ".join(raw.decode().split())
    except UnicodeDecodeError as error:
        raise InputError("not UTF-8", field=where) from error
    if not said:
        raise InputError("empty", field=where, allowed="what the image shows")
    return said


def _of_lines(path: Path, key: str) -> Iterator[ImageText]:
    count = 0
    with open_regular(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}: line {number}"
            said = parse_json(line.decode(errors="replace"), where, finite=False)
            image, text = (said.get(one) if isinstance(said, dict) else None for one in (IMAGE, key))
            if not isinstance(image, str) or not isinstance(text, str) or not image or not text.strip():
                raise InputError("is no pair", field=where, allowed=f'an object with strings "{IMAGE}" and "{key}"')
            count += 1
            if count > MOST_PAIRS:
                raise InputError("too many pairs", field=str(path), allowed=f"at most {MOST_PAIRS:,}")
            file_of = path.parent / image
            require_regular(file_of, where)
            yield ImageText(file_of, text)


def drawn_shapes() -> Iterator[ImageText]:
    """Yields all combinations of size, colour, form and place, each once, in a random order that is always the same."""
    each = list(product(SIZES, COLOURS, FORMS, PLACES))
    for number in range(len(each)):
        size, colour, form, place = each[shuffled(number, len(each), 0)]
        made = Shape(SIZES[size], COLOURS[colour], FORMS[form], PLACES[place], number)
        yield ImageText(made, f"a {size} {colour} {form} {place}")


def contrastive_data(recipe: Recipe, described: Described) -> tuple[PairData[Row], Vocabulary]:
    """Returns the pairs that a recipe names as data, and the tokenizer of their texts.

    Raises InputError for a text or an image that is none, for settings that have no effect on pairs, and for a model
    that reads images of other channels or whose vector of a text is not read at the tokenizer's end.
    """
    data, given = recipe.data, recipe.model
    for name, value in (("step.z_loss", recipe.step.z_loss), ("step.loss_rows", recipe.step.loss_rows)):
        if value:
            raise InputError(
                "not part of the loss of pairs", field=name, value=value, fix="leave it out (it is then 0)"
            )
    if not data.text:
        allowed = f"a folder of images with texts, a file that ends in {JSON_LINES}, or {DRAWN}"
        raise InputError("missing", field="data.text", allowed=allowed)
    own = data.tokenizer in MADE
    if own and given.weights:
        fix = f"data.tokenizer={given.source}"
        raise InputError("the checkpoint has its own", field="data.tokenizer", value=data.tokenizer, fix=fix)
    pairs = read_image_texts(data.text, data.key)
    tokenizer = (
        made_tokenizer(data, [one.text for one in pairs])
        if own
        else Tokenizer.from_file(tokenizer_file(data.tokenizer))
    )
    vocabulary = Vocabulary(tokenizer=tokenizer)
    spec = described(recipe, vocabulary.n_vocab, vocabulary.end_id).spec
    end_id, patches = _end(spec, vocabulary, data.tokenizer), spec.patches
    assert patches is not None
    if patches.channels != CHANNELS:
        raise InputError("images are in RGB", field="model: channels", value=patches.channels, allowed=f"{CHANNELS}")
    source = open_model(given.source, weights=given.weights) if given.source else None
    folder = source.path if source is not None and source.kind == "folder" else None
    preparation = preparation_of(folder, patches.image_size)
    rows = [row_of(pair, tokenizer, end_id, data.context, patches.image_size) for pair in pairs]
    given_file = None if folder is None else folder / PREPROCESSOR
    read = given_file is not None and given_file.is_file()
    beside = {PREPROCESSOR: read_object(given_file, LARGEST) if given_file and read else said_of(preparation)}
    at = len(rows) - round(len(rows) * data.validation)
    made = PairData(
        pairs=rows[:at],
        held_out=rows[at:],
        objective=Paired(preparation=preparation, end_id=end_id),
        batch_size=data.batch,
        seed=recipe.run.seed,
    )
    return made, replace(vocabulary, beside=beside)


def _end(spec: ModelSpec, vocabulary: Vocabulary, named: str) -> int:
    """Returns the token that ends a text; raises InputError if the model does not read a text's vector there."""
    head, end_id = spec.head, vocabulary.end_id
    if not isinstance(head, Projection) or head.reads not in ("end", "highest"):
        said = getattr(head, "reads", type(head).__name__)
        raise InputError("the vector of a text must be read at its end", field="model: head.reads", value=said)
    wanted = head.end if head.reads == "end" else vocabulary.n_vocab - 1
    if end_id is None or end_id != wanted:
        raise InputError(
            f"its end token is {end_id}", field="data.tokenizer", value=named, allowed=f"one that has {wanted}"
        )
    return end_id


def row_of(pair: ImageText, tokenizer: Tokenizer, end_id: int, context: int, side: int) -> Row:
    """Returns an image and the ids of its text: what the tokenizer opens it with, the text, cut to fit, and the end."""
    opening, text, _ = tokenizer.wrapped(pair.text)
    ids = [*opening, *text][: context - 1]
    image = pair.image.drawn(side) if isinstance(pair.image, Shape) else pair.image
    return Row(image, (*ids, end_id))
