"""Language models that hear sounds in a text: Voxtral."""

from __future__ import annotations

from dataclasses import dataclass, fields

from asbuilt.spec.hearing import Hearing
from asbuilt.spec.language_model import LanguageModel
from asbuilt.spec.model import Input
from asbuilt.spec.part import Pass, require
from asbuilt.spec.positions import rotaries_by_length
from asbuilt.spec.vision_language_model import of_images


@dataclass(frozen=True, kw_only=True, repr=False)
class AudioLanguageModel(LanguageModel):
    """A language model that hears sounds in its text: their projected vectors replace placeholder tokens.

    A pass counts sounds as it does images.
    """

    hearing: Hearing
    """The tower, the projector and the placeholder."""

    def __post_init__(self) -> None:
        require(self, "hearing", isinstance(self.hearing, Hearing), "an audio encoder with a projector")
        super().__post_init__()
        made = self.hearing.projector.d_out
        require(self, "hearing", made == self.d_model, f"a projector to d_model = {self.d_model}")
        fixed = not self.hearing.tower.embedding.any_length or not rotaries_by_length(self)
        require(self, "hearing", fixed, "sounds of one length, since RoPE frequencies depend on the text's length")

    @classmethod
    def of(cls, text: LanguageModel, hearing: Hearing) -> AudioLanguageModel:
        """Returns the language model with sounds in its text."""
        return cls(**{field.name: getattr(text, field.name) for field in fields(text)}, hearing=hearing)

    @property
    def text(self) -> LanguageModel:
        """Returns the language model alone."""
        return LanguageModel(**{field.name: getattr(self, field.name) for field in fields(LanguageModel)})

    @property
    def reads(self) -> tuple[Input, ...]:
        """Tokens, and sounds that replace some of them."""
        return ("tokens", "audio")

    @property
    def image_tokens(self) -> int:
        """Placeholders per sound."""
        return self.hearing.n_tokens

    @property
    def heard(self) -> Hearing:
        """Its `hearing`."""
        return self.hearing

    def child_run(self, name: str, run: Pass) -> Pass | None:
        """The tower processes all sounds, each in one pass."""
        return of_images(run) if name == "hearing" else super().child_run(name, run)
