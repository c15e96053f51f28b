"""The powers that entmax sums."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def powers(b_x, b_y, beta, KIND: tl.constexpr):
    """(x^beta, x^(beta - 1)), 0 where x <= 0; y = x - 1 keeps the digits of x near 1."""
    m_zero = b_x <= 0.0
    if KIND == 2:
        b_p, b_slope = tl.where(m_zero, 0.0, b_x), tl.where(m_zero, 0.0, 1.0)
    elif KIND == 1:
        b_slope = tl.where(m_zero, 0.0, b_x)
        b_p = b_slope * b_slope
    else:
        b_near = tl.where(b_y < -0.5, 0.0, b_y)
        b_one = 1.0 + b_near
        b_rest = b_one - 1.0
        b_log = tl.where(b_rest == 0.0, b_near * 1.4426950408889634,
                         tl.log2(b_one) * (b_near / tl.where(b_rest == 0.0, 1.0, b_rest)))  # fmt: skip
        b_log = tl.where(b_y < -0.5, tl.log2(tl.where(m_zero, 1.0, b_x)), b_log)
        b_p = tl.where(m_zero, 0.0, tl.exp2(beta * b_log))
        b_slope = tl.where(m_zero, 0.0, tl.exp2((beta - 1.0) * b_log))
    return b_p, b_slope
