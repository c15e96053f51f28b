"""Programmatic dependent launch: a kernel starts while the one before it ends, and waits where it needs its results.

Every program of every kernel of a step calls :func:`begin` before it reads or writes what other kernels touch, and
before it can return; so a kernel that has ended implies that all before it have. The interpreter and GPUs before sm_90
have no such launches: PDL is a constexpr.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait


@triton.jit
def begin(PDL: tl.constexpr):
    """Waits for the kernels before this one. The next one may start as soon as this one's programs end: earlier, its
    programs would fill multiprocessors unevenly while this one still runs."""
    if PDL:
        gdc_wait()


def options(pdl: bool) -> dict[str, Any]:
    """Launch options of a kernel compiled with ``PDL=pdl``."""
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}
