"""flowlib: a small language for sparse attention in LLM decoding.

A method is one class (:class:`vFlow`), registered by name. It is profiled without data, verified in float64 torch and
run as fused Triton kernels over the pages of a KV memory pool; stock SGLang serves it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from flowlib.core.context import ContextBase
from flowlib.core.flow import vFlow, vFlowMLA
from flowlib.core.formats import FORMAT, Mode
from flowlib.core.refused import REFUSED, refused
from flowlib.core.registry import register
from flowlib.core.spec import Spec
from flowlib.core.vtensor import SelectionHandle, as_vtensor, vTensor

if TYPE_CHECKING:
    from flowlib import entmax, mla
    from flowlib.entmax.cache import PagedKVCache
    from flowlib.runtime.api import build, dense, list_flows, profile
    from flowlib.runtime.batch import Batch
    from flowlib.runtime.contexts import RunContext
    from flowlib.runtime.plan import Plan, StepOutput
    from flowlib.runtime.pool import KVStore, PagedPool

__version__ = "0.1.0"

_LAZY = {
    "Batch": "flowlib.runtime.batch",
    "KVStore": "flowlib.runtime.pool",
    "PagedKVCache": "flowlib.entmax.cache",
    "PagedPool": "flowlib.runtime.pool",
    "Plan": "flowlib.runtime.plan",
    "RunContext": "flowlib.runtime.contexts",
    "StepOutput": "flowlib.runtime.plan",
    "build": "flowlib.runtime.api",
    "dense": "flowlib.runtime.api",
    "list_flows": "flowlib.runtime.api",
    "profile": "flowlib.runtime.api",
}
"""Names loaded at first use: algorithms import this package, and the runtime imports algorithms."""

_PACKAGES = frozenset({"entmax", "mla"})
"""Functional APIs, loaded at first use."""

__all__ = [
    "FORMAT",
    "Batch",
    "ContextBase",
    "KVStore",
    "Mode",
    "PagedKVCache",
    "PagedPool",
    "Plan",
    "RunContext",
    "SelectionHandle",
    "Spec",
    "StepOutput",
    "as_vtensor",
    "build",
    "dense",
    "entmax",
    "list_flows",
    "mla",
    "profile",
    "register",
    "vFlow",
    "vFlowMLA",
    "vTensor",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name in _PACKAGES:
        return importlib.import_module(f"flowlib.{name}")
    if name in REFUSED:
        return refused(name)
    raise AttributeError(f"module 'flowlib' has no attribute {name!r}")
