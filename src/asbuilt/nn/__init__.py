"""The torch modules: one per part, with the spec's paths."""

from asbuilt.nn.build import build, built_parameters, initialise, stored_tensors
from asbuilt.nn.step import Step

__all__ = ["Step", "build", "built_parameters", "initialise", "stored_tensors"]
