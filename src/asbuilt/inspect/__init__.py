"""Looking inside a built model: activations by path."""

from asbuilt.inspect.diff import Difference, diff
from asbuilt.inspect.reference import diff_transformers, first_divergence
from asbuilt.inspect.taps import activations

__all__ = ["Difference", "activations", "diff", "diff_transformers", "first_divergence"]
