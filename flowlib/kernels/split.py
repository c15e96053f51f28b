"""fp32 values as sums of 16-bit ones, so that their products with 16-bit values run on tensor cores without rounding.

A product of two 16-bit values is exact in fp32; three 8-bit (bf16) or 11-bit (fp16) parts hold the 24 bits of fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def part_of(b_x, i_part: tl.constexpr, DTYPE: tl.constexpr):
    """Part 0, 1 or 2 of fp32 values, largest first."""
    b_part = b_x.to(DTYPE)
    for _ in tl.static_range(i_part):
        b_x = tl.where(tl.abs(b_x) == float("inf"), 0.0, b_x - b_part.to(tl.float32))
        b_part = b_x.to(DTYPE)
    return b_part


@triton.jit
def parts_in_rows(b_x, ROWS: tl.constexpr, DTYPE: tl.constexpr):
    """``[1, 1, c]`` fp32 as ``[ROWS, c]``: the three parts, then zeros."""
    o_row = tl.arange(0, ROWS)[None, :, None]
    b_rows = tl.where(o_row == 0, part_of(b_x, 0, DTYPE), tl.zeros([1, ROWS, 1], DTYPE))
    b_rows = tl.where(o_row == 1, part_of(b_x, 1, DTYPE), b_rows)
    b_rows = tl.where(o_row == 2, part_of(b_x, 2, DTYPE), b_rows)
    return tl.reshape(b_rows, [ROWS, b_x.shape[2]])


@triton.jit
def scaled_to_fp16(b_x):
    """(x · f, 1 / f) with the power of two f that brings the largest magnitude of the block to [2^14, 2^15).

    fp16 parts of x · f then hold what fp32 holds: only values 2^38 times smaller than the largest lose bits.
    """
    b_exponent = tl.max(tl.abs(b_x)).to(tl.int32, bitcast=True) >> 23
    b_exponent = tl.minimum(tl.maximum(b_exponent, 15), 254)
    b_up = ((268 - b_exponent) << 23).to(tl.float32, bitcast=True)
    b_down = ((b_exponent - 14) << 23).to(tl.float32, bitcast=True)
    return b_x * b_up, b_down
