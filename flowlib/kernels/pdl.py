"""Programmatic dependent launch: a kernel starts while the one before it ends, and waits where it needs its results.

Every program of every kernel of a step calls :func:`begin` before it reads or writes what other kernels touch, and
before it can return; so a kernel that has ended implies that all before it have. The interpreter and GPUs before sm_90
have no such launches: PDL is a constexpr.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def begin(PDL: tl.constexpr):
    """Waits for the kernels before this one, and lets the next one start."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


def options(pdl: bool) -> dict[str, Any]:
    """Launch options of a kernel compiled with ``PDL=pdl``."""
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}
