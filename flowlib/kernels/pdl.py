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


WAIT = 1
"""The kernel starts while the one before it ends."""
RELEASE = 2
"""Moreover, the kernel after it may start once all its programs run: good where either grid is small. Else programs of
the next kernel fill multiprocessors unevenly while this one still runs."""


@triton.jit
def begin(PDL: tl.constexpr):
    """Waits for the kernels before this one."""
    if PDL > 0:
        gdc_wait()
    if PDL > 1:
        gdc_launch_dependents()


def options(pdl: int) -> dict[str, Any]:
    """Launch options of a kernel compiled with ``PDL=pdl``: 0 for an ordinary launch, else WAIT or RELEASE."""
    return {"PDL": pdl, "launch_pdl": True} if pdl else {"PDL": 0}
