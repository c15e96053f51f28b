"""What every name of the stand-in resolves to."""

from enum import Enum
from typing import Any


class InterpolationMode(Enum):
    """The names that image processors mention when they are imported."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def missing(name: str) -> type:
    """A class called `name` that can be imported and subclassed, but not made."""
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"torchvision.{name}: a stand-in for torchvision is installed, for text models only")

    return type(name, (), {"__init__": refuse})
