"""Softmax over the scored pages of a row, in place or not. One program a plane of a row."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from flowlib.kernels.pdl import begin, options

_REGISTER_WIDTH = 8192
_LOOP_BLOCK = 4096
_VALUES_PER_THREAD = 8


@triton.jit
def _logits(p_x, o_w, s_page, first, last, scale):
    """Base-2 logits of the pages in [first, last), -inf elsewhere."""
    m_scored = (o_w >= first) & (o_w < last)
    # [BW]
    b_x = tl.load(p_x + o_w.to(tl.int64) * s_page, mask=m_scored, other=0.0)
    return tl.where(m_scored, b_x * scale, float("-inf"))


@triton.jit
def softmax_kernel(
    p_x, p_y, p_seq_lens, s_x_row, s_x_plane, s_x_page, s_y_row, s_y_plane, s_y_page, scale, W, bos, eos,
    H: tl.constexpr, PLANES: tl.constexpr, PAGE: tl.constexpr, LOOP: tl.constexpr, BW: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    i_row, i_plane = tl.program_id(0).to(tl.int64) // PLANES, tl.program_id(0) % PLANES
    begin(PDL)
    n_pages = tl.minimum((tl.load(p_seq_lens + i_row // H) + PAGE - 1) // PAGE, W)
    first, last = bos, n_pages - eos
    p_x += i_row * s_x_row + i_plane * s_x_plane
    p_y += i_row * s_y_row + i_plane * s_y_plane
    if LOOP:
        top = tl.full((), float("-inf"), tl.float32)
        for o in tl.range(0, n_pages, BW):
            b_z = _logits(p_x, o + tl.arange(0, BW), s_x_page, first, last, scale)
            top = tl.maximum(top, tl.max(b_z))
        total = tl.zeros((), tl.float32)
        for o in tl.range(0, n_pages, BW):
            b_z = _logits(p_x, o + tl.arange(0, BW), s_x_page, first, last, scale)
            total += tl.sum(tl.exp2(b_z - top))
        for o in tl.range(0, n_pages, BW):
            o_w = o + tl.arange(0, BW)
            b_y = tl.exp2(_logits(p_x, o_w, s_x_page, first, last, scale) - top) / total
            m_scored = (o_w >= first) & (o_w < last)
            tl.store(p_y + o_w.to(tl.int64) * s_y_page, tl.where(m_scored, b_y, 0.0), mask=o_w < n_pages)
    else:
        o_w = tl.arange(0, BW)
        b_z = _logits(p_x, o_w, s_x_page, first, last, scale)
        b_y = tl.exp2(b_z - tl.max(b_z))
        m_scored = (o_w >= first) & (o_w < last)
        b_y = tl.where(m_scored, b_y / tl.sum(b_y), 0.0)
        tl.store(p_y + o_w.to(tl.int64) * s_y_page, b_y, mask=o_w < n_pages)


def launch_softmax(
    x: Any, y: Any, seq_lens: Any, *, num_kv_heads: int, page_size: int, bos: int, eos: int, scale: float,
    pdl: bool = False,
) -> None:
    """``y = softmax(scale * x)`` over the scored pages ``[bos, S - eos)`` of every row.

    Args:
        x, y: fp32 ``[bs * num_kv_heads, n, W]``, any strides; one softmax a (row, plane), over W. y may be x.
        seq_lens: int32 ``[bs]``, tokens; ``S = min(ceil(seq_len / page_size), W)``.

    Reserved pages get 0 and pages from S on are left alone. A row whose scored pages are all -inf gives NaN there.
    `pdl` asks for programmatic dependent launch.
    """
    rows, planes, width = x.shape
    loop = width > _REGISTER_WIDTH
    block = _LOOP_BLOCK if loop else triton.next_power_of_2(max(width, 32))
    softmax_kernel[(rows * planes,)](
        x, y, seq_lens, *x.stride(), *y.stride(), scale * 1.4426950408889634, width, bos, eos,
        H=num_kv_heads, PLANES=planes, PAGE=page_size, LOOP=loop, BW=block,
        num_warps=min(16, max(1, block // (32 * _VALUES_PER_THREAD))), num_stages=1, **options(pdl),
    )  # fmt: skip
