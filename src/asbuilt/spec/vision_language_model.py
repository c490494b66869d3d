"""Language models that read images in a text: LLaVA, Gemma 3, Llama 4."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from asbuilt.spec.language_model import LanguageModel
from asbuilt.spec.model import Input
from asbuilt.spec.part import Pass, require
from asbuilt.spec.vision import PatchEmbedding, Vision


@dataclass(frozen=True, kw_only=True, repr=False)
class VisionLanguageModel(LanguageModel):
    """A language model in whose text images stand: their projected patches take the places of placeholder tokens."""

    vision: Vision
    """What becomes of images."""

    def __post_init__(self) -> None:
        require(self, "vision", isinstance(self.vision, Vision), "a tower of patches with a projector")
        super().__post_init__()
        made = self.vision.projector.d_out
        require(self, "vision", made == self.d_model, f"a projector to d_model = {self.d_model}")
        masked = not self.vision.both_ways or all(part.sees_images for part in self.mixers)
        allowed = "images that see both ways in causal attention alone, without chunks and distances"
        require(self, "vision", masked, allowed)

    @classmethod
    def of(cls, text: LanguageModel, vision: Vision) -> VisionLanguageModel:
        """Returns the language model with images in its text."""
        return cls(**{field.name: getattr(text, field.name) for field in fields(text)}, vision=vision)

    @property
    def text(self) -> LanguageModel:
        """The language model alone."""
        return LanguageModel(**{field.name: getattr(self, field.name) for field in fields(LanguageModel)})

    @property
    def reads(self) -> tuple[Input, ...]:
        """Tokens, and images in the places of some."""
        return ("tokens", "images")

    @property
    def patches(self) -> PatchEmbedding:
        """The tower's embedding."""
        return self.vision.tower.embedding

    @property
    def image_tokens(self) -> int:
        """Placeholders that one image takes."""
        return self.vision.n_tokens

    def child_run(self, name: str, run: Pass) -> Pass | None:
        """The tower sees all images; an image is always read as a whole."""
        return of_images(run) if name == "vision" else super().child_run(name, run)

    def _own(self, run: Pass) -> Pass:
        """Tokens of one image may see one another both ways."""
        return replace(run, mutual=self.vision.n_tokens) if self.vision.both_ways and run.images else run


def of_images(run: Pass) -> Pass | None:
    """Returns the run of the images of all texts; None where there are none."""
    if not run.images:
        return None
    return replace(run, batch=run.batch * run.images, past=0, mutual=0, logits="all")
