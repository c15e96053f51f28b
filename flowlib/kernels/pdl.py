"""Programmatic dependent launch: a kernel starts while the one before it ends, and waits where it needs its results.

Every program of every kernel of a step calls :func:`begin` before it reads or writes what the kernel before it touches,
and before it can return; so a kernel that has ended implies that all before it have. The interpreter and GPUs before
sm_90 have no such launches: PDL is a constexpr.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

RELEASE = tl.constexpr(2)


@triton.jit
def begin(PDL: tl.constexpr):
    """Waits for the kernels before this one. The next one may start as soon as this one's programs end: earlier, its
    programs would fill multiprocessors unevenly while this one still runs. With RELEASE it may start once this one has
    waited, so it knows of all kernels but this one that they have ended."""
    if PDL:
        gdc_wait()
        if PDL == RELEASE:
            gdc_launch_dependents()


def options(pdl: bool, release: bool = False) -> dict[str, Any]:
    """Launch options of a kernel that begins so; `release` for one whose results the next one has no use for."""
    return {"PDL": RELEASE.value if release else True, "launch_pdl": True} if pdl else {"PDL": False}
