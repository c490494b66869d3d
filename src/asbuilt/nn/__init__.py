"""The torch modules: one per part, at the spec's own paths."""

from asbuilt.nn.build import build, built_parameters, initialise, stored_tensors
from asbuilt.nn.step import Step

__all__ = ["Step", "build", "built_parameters", "initialise", "stored_tensors"]
