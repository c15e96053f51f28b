"""A stand-in for torchvision: SGLang and transformers import it for any model, text models never call it.

The published torchvision does not import beside the CPU build of torch (`operator torchvision::nms does not exist`).
Names resolve; calling one raises NotImplementedError.
"""

from . import io, transforms

__all__ = ["io", "transforms"]
__version__ = "0.0.0+stub"
