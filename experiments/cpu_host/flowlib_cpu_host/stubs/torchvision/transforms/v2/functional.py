"""Stand-in: see torchvision/__init__.py."""

from torchvision._missing import InterpolationMode
from torchvision._missing import missing as __getattr__

__all__ = ["InterpolationMode", "__getattr__"]
