"""Language models that read images in a text: LLaVA, Gemma 3, Llama 4; and sounds too: Gemma 4."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from asbuilt.errors import InputError
from asbuilt.spec.cross import CrossAttention
from asbuilt.spec.hearing import Hearing
from asbuilt.spec.language_model import LanguageModel
from asbuilt.spec.model import Input
from asbuilt.spec.norms import RMSNorm
from asbuilt.spec.own_tokens import OwnTokens
from asbuilt.spec.part import Pass, require
from asbuilt.spec.positions import rotaries_by_length
from asbuilt.spec.vision import MLPProjector, PatchEmbedding, Vision


@dataclass(frozen=True, kw_only=True, repr=False)
class VisionLanguageModel(LanguageModel):
    """A language model that reads images in its text: their projected patches replace placeholder tokens.

    It may hear sounds too, whose projected vectors replace others.
    """

    vision: Vision
    """The tower, the projector and the placeholder."""
    hearing: Hearing | None = None
    """The same of sounds; None if it hears none."""
    own_tokens: tuple[OwnTokens, ...] = ()
    """Token ids that images or sounds have rows of their own for."""

    def __post_init__(self) -> None:
        require(self, "vision", isinstance(self.vision, Vision), "a tower of patches with a projector")
        super().__post_init__()
        made = self.vision.projector.d_out
        require(self, "vision", made == self.d_model, f"a projector to d_model = {self.d_model}")
        masked = not self.vision.both_ways or all(part.sees_images for part in self.mixers)
        allowed = "without bidirectional images, which need causal attention without chunks and distance terms"
        require(self, "vision", masked, allowed)
        if self.vision.prefix:
            fixed = not rotaries_by_length(self)
            require(self, "vision", fixed, "without a prefix, since RoPE frequencies depend on the text's length")
        self._require_any_size()
        self._require_across()
        if self.hearing is not None:
            self._require_sounds(self.hearing)
        self._require_own_tokens()

    def _require_sounds(self, hearing: Hearing) -> None:
        """Requires sounds that fit the text, beside images that stand in it too."""
        require(self, "hearing", isinstance(hearing, Hearing), "an audio encoder with a projector, or none")
        made = hearing.projector.d_out
        require(self, "hearing", made == self.d_model, f"a projector to d_model = {self.d_model}")
        apart = hearing.placeholder != self.vision.placeholder
        require(self, "hearing", apart, f"another placeholder than that of images, {self.vision.placeholder}")
        inside = not self.vision.crosses and not rotaries_by_length(self)
        allowed = "none beside images that are read across, or RoPE frequencies that depend on the text's length"
        require(self, "hearing", inside, allowed)

    def _require_own_tokens(self) -> None:
        """Requires own tokens of what is there, through one map and its RMSNorm, to different ids."""
        found, last = self.own_tokens, 0
        require(self, "own_tokens", isinstance(found, tuple), "a tuple of OwnTokens")
        for one in found:
            require(self, "own_tokens", isinstance(one, OwnTokens), "a tuple of OwnTokens")
            after = last <= one.first and one.past <= self.n_rows
            require(self, "own_tokens", after, f"ids one after the other, below {self.n_rows}")
            last = one.past
            through = getattr(getattr(self, one.through), "projector", None)
            fits = (
                isinstance(through, MLPProjector)
                and through.widths == (one.d_table, one.d_model)
                and not through.bias
                and isinstance(through.post_norm, RMSNorm)
                and through.post_norm.gain == "none"
            )
            allowed = f"{one.through} through one map from {one.d_table} to {self.d_model}, and an RMSNorm without gain"
            require(self, "own_tokens", fits and one.d_model == self.d_model, allowed)
        heard = any(one.through == "hearing" for one in found)
        filled = self.hearing is not None and self.hearing.filled
        require(self, "hearing", heard or not filled, "sounds that are not filled up, without own tokens of sounds")

    def _require_across(self) -> None:
        """Requires cross-attention to as many vectors as an image has, if it reads images, and none otherwise."""
        crosses, made = self.vision.crosses, self.vision.projector.d_out
        require(self, "d_source", self.d_source == (made if crosses else None), f"{made if crosses else None}")
        read = [part.n_source for part in self.mixers if isinstance(part, CrossAttention)]
        n = self.vision.n_made
        require(self, "blocks", all(one == n for one in read), f"cross-attention with n_source = {n}")
        fixed = not crosses or not rotaries_by_length(self)
        require(self, "vision", fixed, "images in the text, since RoPE frequencies depend on its length")
        lone = not crosses or self.streams is None
        require(self, "streams", lone, "one stream, beside cross-attention to images")

    def _require_any_size(self) -> None:
        """Requires what images of any size need of the text."""
        alone = self.vision.n_vectors == 1 or self.streams is None
        require(self, "vision", alone, "without vectors added after blocks, beside several residual streams")
        few = self.least_blocks <= self.n_layers
        require(self, "vision", few, f"at most n_layers = {self.n_layers} blocks after which vectors are added")
        fixed = not self.vision.tower.embedding.any_size or not rotaries_by_length(self)
        require(self, "vision", fixed, "images of one size, since RoPE frequencies depend on the text's length")

    @property
    def least_blocks(self) -> int:
        """Blocks after which vectors of images are added, one at least."""
        return max(1, self.vision.n_vectors - 1)

    @classmethod
    def of(
        cls,
        text: LanguageModel,
        vision: Vision,
        hearing: Hearing | None = None,
        own_tokens: tuple[OwnTokens, ...] = (),
    ) -> VisionLanguageModel:
        """Returns the language model with images in its text, and sounds and tokens of their own if given."""
        own = {field.name: getattr(text, field.name) for field in fields(text)}
        return cls(**own, vision=vision, hearing=hearing, own_tokens=own_tokens)

    @property
    def text(self) -> LanguageModel:
        """Returns the language model alone."""
        return LanguageModel(**{field.name: getattr(self, field.name) for field in fields(LanguageModel)})

    @property
    def reads(self) -> tuple[Input, ...]:
        """Tokens, images that replace some of them, and how many attend both ways, if it has such a prefix; sounds."""
        seen: tuple[Input, ...] = ("tokens", "images", "prefix") if self.vision.prefix else ("tokens", "images")
        return seen if self.hearing is None else (*seen, "audio")

    @property
    def patches(self) -> PatchEmbedding:
        """The tower's embedding."""
        return self.vision.tower.embedding

    @property
    def image_tokens(self) -> int:
        """Placeholders per image."""
        return self.vision.n_tokens

    @property
    def heard(self) -> Hearing | None:
        """Its `hearing`."""
        return self.hearing

    def child_run(self, name: str, run: Pass) -> Pass | None:
        """The towers process all images, and all sounds, each in one pass."""
        if name == "hearing":
            return of_images(replace(run, images=run.sounds, sounds=0))
        return of_images(replace(run, sounds=0)) if name == "vision" else super().child_run(name, run)

    def _own(self, run: Pass) -> Pass:
        """Returns the pass, with bidirectional attention within an image, or the prefix, which is all, if enabled.

        Where images are read across, they are its source: of cached ones, in a pass without new ones, it says so.
        """
        if self.vision.crosses:
            if run.images > 1:
                raise InputError(field="images", value=run.images, allowed="0 or 1: a text reads one image across")
            return replace(run, source=self.vision.n_made if run.images or run.source else 0)
        if not self.vision.both_ways or not run.images:
            return run
        if self.vision.prefix:
            return replace(run, images=1, mutual=run.tokens, mutual_whole=True)
        return replace(run, mutual=self.vision.n_tokens, mutual_in_windows=self.vision.in_windows)


def of_images(run: Pass) -> Pass | None:
    """Returns the pass over the images of all texts; None without images."""
    if not run.images:
        return None
    return replace(run, batch=run.batch * run.images, past=0, mutual=0, logits="all")
