"""Segment ops along the scored pages of a row: reductions, normalisation, convolution, filters.

One program works on one plane ``[W]`` of a row, block by block in page order: results are the same on every run.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from flowlib.kernels.ordered import keys_of
from flowlib.kernels.pdl import begin, options

_BLOCK = 4096
_VALUES_PER_THREAD = 8
_REDUCTIONS = {"Sum": 0, "Mean": 1, "Max": 2, "Min": 3, "L2Norm": 4}


@triton.jit
def _scored_range(p_seq_lens, i_row, W, bos, eos, H: tl.constexpr, PAGE: tl.constexpr):
    """(first, last, pages of the row): pages [first, last) are scored."""
    n_pages = tl.maximum(tl.minimum((tl.load(p_seq_lens + i_row // H) + PAGE - 1) // PAGE, W), 0)
    return bos, n_pages - eos, n_pages


@triton.jit
def reduce_kernel(
    p_x, p_y, p_seq_lens, s_x_row, s_x_plane, s_x_page, s_y_row, s_y_plane, W, bos, eos,
    H: tl.constexpr, PLANES: tl.constexpr, PAGE: tl.constexpr, KIND: tl.constexpr, BW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    i_row, i_plane = tl.program_id(0).to(tl.int64) // PLANES, tl.program_id(0) % PLANES
    begin(PDL)
    first, last, n_pages = _scored_range(p_seq_lens, i_row, W, bos, eos, H, PAGE)
    p_x += i_row * s_x_row + i_plane * s_x_plane
    total = tl.zeros((), tl.float32)
    if KIND == 2:
        total = tl.full((), float("-inf"), tl.float32)
    if KIND == 3:
        total = tl.full((), float("inf"), tl.float32)
    for o in tl.range(0, n_pages, BW):
        o_w = o + tl.arange(0, BW)
        m_scored = (o_w >= first) & (o_w < last)
        # [BW]
        b_x = tl.load(p_x + o_w.to(tl.int64) * s_x_page, mask=m_scored, other=0.0)
        if KIND == 2:
            total = tl.maximum(total, tl.max(tl.where(m_scored & (b_x == b_x), b_x, float("-inf"))))
        elif KIND == 3:
            total = tl.minimum(total, tl.min(tl.where(m_scored & (b_x == b_x), b_x, float("inf"))))
        elif KIND == 4:
            total += tl.sum(b_x * b_x)
        else:
            total += tl.sum(b_x)
    if KIND == 1:
        total = total / tl.maximum(last - first, 1).to(tl.float32)
    if KIND == 4:
        total = tl.sqrt_rn(total)
    tl.store(p_y + i_row * s_y_row + i_plane * s_y_plane, total)


@triton.jit
def normalize_kernel(
    p_x, p_y, p_seq_lens, s_x_row, s_x_plane, s_x_page, s_y_row, s_y_plane, s_y_page, W, bos, eos,
    H: tl.constexpr, PLANES: tl.constexpr, PAGE: tl.constexpr, SQUARED: tl.constexpr, BW: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    i_row, i_plane = tl.program_id(0).to(tl.int64) // PLANES, tl.program_id(0) % PLANES
    begin(PDL)
    first, last, n_pages = _scored_range(p_seq_lens, i_row, W, bos, eos, H, PAGE)
    p_x += i_row * s_x_row + i_plane * s_x_plane
    p_y += i_row * s_y_row + i_plane * s_y_plane
    total = tl.zeros((), tl.float32)
    for o in tl.range(0, n_pages, BW):
        o_w = o + tl.arange(0, BW)
        m_scored = (o_w >= first) & (o_w < last)
        # [BW]
        b_x = tl.load(p_x + o_w.to(tl.int64) * s_x_page, mask=m_scored, other=0.0)
        total += tl.sum(b_x * b_x) if SQUARED else tl.sum(b_x)
    if SQUARED:
        total = tl.sqrt_rn(total)
    for o in tl.range(0, n_pages, BW):
        o_w = o + tl.arange(0, BW)
        m_scored = (o_w >= first) & (o_w < last)
        b_x = tl.load(p_x + o_w.to(tl.int64) * s_x_page, mask=m_scored, other=0.0)
        tl.store(p_y + o_w.to(tl.int64) * s_y_page, tl.where(m_scored, b_x / total, 0.0), mask=o_w < n_pages)


@triton.jit
def conv1d_kernel(
    p_x, p_y, p_seq_lens, s_x_row, s_x_plane, s_x_page, s_y_row, s_y_plane, s_y_page, W, bos, eos,
    H: tl.constexpr, PLANES: tl.constexpr, PAGE: tl.constexpr, WEIGHT: tl.constexpr, TAPS: tl.constexpr,
    BW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    i_row, i_plane = tl.program_id(0).to(tl.int64) // PLANES, tl.program_id(0) % PLANES
    begin(PDL)
    first, last, n_pages = _scored_range(p_seq_lens, i_row, W, bos, eos, H, PAGE)
    p_x += i_row * s_x_row + i_plane * s_x_plane
    p_y += i_row * s_y_row + i_plane * s_y_plane
    for o in tl.range(0, n_pages, BW):
        o_w = o + tl.arange(0, BW)
        b_y = tl.zeros((BW,), tl.float32)
        for i_tap in tl.static_range(TAPS):
            o_x = o_w + (i_tap - TAPS // 2)
            m_x = (o_x >= first) & (o_x < last)
            # [BW]
            b_y += WEIGHT[i_tap] * tl.load(p_x + o_x.to(tl.int64) * s_x_page, mask=m_x, other=0.0)
        m_scored = (o_w >= first) & (o_w < last)
        tl.store(p_y + o_w.to(tl.int64) * s_y_page, tl.where(m_scored, b_y, 0.0), mask=o_w < n_pages)


@triton.jit
def _mass(p_x, o_w, s_page, first, last, top, scale, SOFTMAX: tl.constexpr):
    """Unnormalised mass of the pages that may be kept, 0 for the others."""
    m_scored = (o_w >= first) & (o_w < last)
    # [BW]
    b_x = tl.load(p_x + o_w.to(tl.int64) * s_page, mask=m_scored, other=float("-inf"))
    m_kept = b_x > float("-inf")
    if SOFTMAX:
        b_x = tl.where(b_x == top, 1.0, tl.exp2((b_x - top) * scale))
    return tl.where(m_kept, b_x, 0.0)


@triton.jit
def _above(
    p_x, s_page, n_pages, first, last, top, scale, key, COUNT: tl.constexpr, SOFTMAX: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """How many pages, or how much mass, have a key of at least `key`."""
    total = tl.zeros((), tl.float32)
    for o in tl.range(0, n_pages, BW):
        o_w = o + tl.arange(0, BW)
        b_key = keys_of(p_x, o_w, s_page, first, last)
        b_m = (b_key > 0).to(tl.float32) if COUNT else _mass(p_x, o_w, s_page, first, last, top, scale, SOFTMAX)
        total += tl.sum(tl.where(b_key >= key, b_m, 0.0))
    return total


@triton.jit
def filter_kernel(
    p_x, p_y, p_seq_lens, s_x_row, s_x_plane, s_x_page, s_y_row, s_y_plane, s_y_page, W, bos, eos, k, p, scale,
    H: tl.constexpr, PLANES: tl.constexpr, PAGE: tl.constexpr, COUNT: tl.constexpr, SOFTMAX: tl.constexpr,
    BW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    i_row, i_plane = tl.program_id(0).to(tl.int64) // PLANES, tl.program_id(0) % PLANES
    begin(PDL)
    first, last, n_pages = _scored_range(p_seq_lens, i_row, W, bos, eos, H, PAGE)
    p_x += i_row * s_x_row + i_plane * s_x_plane
    p_y += i_row * s_y_row + i_plane * s_y_plane
    top = tl.full((), float("-inf"), tl.float32)
    for o in tl.range(0, n_pages, BW):
        o_w = o + tl.arange(0, BW)
        m_scored = (o_w >= first) & (o_w < last)
        # [BW]
        b_x = tl.load(p_x + o_w.to(tl.int64) * s_x_page, mask=m_scored, other=float("-inf"))
        top = tl.maximum(top, tl.max(tl.where(b_x > float("-inf"), b_x, float("-inf"))))
    everything = _above(p_x, s_x_page, n_pages, first, last, top, scale, tl.full((), 1, tl.uint32), COUNT, SOFTMAX, BW)
    goal = tl.minimum(everything, k) if COUNT else everything * p
    threshold = tl.zeros((), tl.uint32)
    for i_bit in tl.static_range(31, -1, -1):
        candidate = threshold | (1 << i_bit)
        above = _above(p_x, s_x_page, n_pages, first, last, top, scale, candidate, COUNT, SOFTMAX, BW)
        threshold = tl.where(above >= goal, candidate, threshold)
    rest = goal - _above(p_x, s_x_page, n_pages, first, last, top, scale, threshold + 1, COUNT, SOFTMAX, BW)
    taken = tl.zeros((), tl.float32)
    for o in tl.range(0, n_pages, BW):
        o_w = o + tl.arange(0, BW)
        b_key = keys_of(p_x, o_w, s_x_page, first, last)
        m_tied = (b_key == threshold) & (b_key > 0)
        b_m = (b_key > 0).to(tl.float32) if COUNT else _mass(p_x, o_w, s_x_page, first, last, top, scale, SOFTMAX)
        b_m = tl.where(m_tied, b_m, 0.0)
        m_taken = (b_key > threshold) | (m_tied & (taken + tl.cumsum(b_m, 0) - b_m < rest))
        taken += tl.sum(b_m)
        b_x = tl.load(p_x + o_w.to(tl.int64) * s_x_page, mask=m_taken, other=0.0)
        tl.store(p_y + o_w.to(tl.int64) * s_y_page, tl.where(m_taken, b_x, float("-inf")), mask=o_w < n_pages)


def launch_reduce(
    x: Any, y: Any, seq_lens: Any, *, num_kv_heads: int, page_size: int, bos: int, eos: int, reduction: str,
    pdl: bool = False,
) -> None:
    """Reduces x fp32 ``[R, n, W]`` over the scored pages into y fp32 ``[R, n]``.

    ``reduction`` is Sum, Mean, Max, Min or L2Norm. A row without a scored page gives the identity (0 for Mean).
    """
    rows, planes, width = x.shape
    block, warps = _block(width)
    reduce_kernel[(rows * planes,)](
        x, y, seq_lens, *x.stride(), *y.stride(), width, bos, eos,
        H=num_kv_heads, PLANES=planes, PAGE=page_size, KIND=_REDUCTIONS[reduction], BW=block,
        num_warps=warps, num_stages=1, **options(pdl),
    )  # fmt: skip


def launch_normalize(
    x: Any, y: Any, seq_lens: Any, *, num_kv_heads: int, page_size: int, bos: int, eos: int, squared: bool,
    pdl: bool = False,
) -> None:
    """y = x / sum(x), or x / sqrt(sum(x * x)), over the scored pages of fp32 ``[R, n, W]``; reserved pages get 0.

    y may be x.
    """
    rows, planes, width = x.shape
    block, warps = _block(width)
    normalize_kernel[(rows * planes,)](
        x, y, seq_lens, *x.stride(), *y.stride(), width, bos, eos,
        H=num_kv_heads, PLANES=planes, PAGE=page_size, SQUARED=squared, BW=block,
        num_warps=warps, num_stages=1, **options(pdl),
    )  # fmt: skip


def launch_conv1d(
    x: Any, y: Any, seq_lens: Any, *, num_kv_heads: int, page_size: int, bos: int, eos: int,
    weight: tuple[float, ...], pdl: bool = False,
) -> None:  # fmt: skip
    """Cross-correlation of the scored pages of fp32 ``[R, n, W]`` with `weight` around each page; y must not be x.

    Pages that are not scored count as 0, and reserved pages get 0.
    """
    rows, planes, width = x.shape
    block, warps = _block(width)
    conv1d_kernel[(rows * planes,)](
        x, y, seq_lens, *x.stride(), *y.stride(), width, bos, eos,
        H=num_kv_heads, PLANES=planes, PAGE=page_size, WEIGHT=weight, TAPS=len(weight), BW=block,
        num_warps=warps, num_stages=1, **options(pdl),
    )  # fmt: skip


def launch_keep_top(
    x: Any, y: Any, seq_lens: Any, *, num_kv_heads: int, page_size: int, bos: int, eos: int, k: int,
    pdl: bool = False,
) -> None:
    """y = x at the k best scored pages of fp32 ``[R, n, W]``, ties to the lower page, else -inf. y may be x."""
    _launch_filter(x, y, seq_lens, num_kv_heads, page_size, bos, eos, k=k, p=0.0, softmax_scale=None, pdl=pdl)


def launch_keep_nucleus(
    x: Any, y: Any, seq_lens: Any, *, num_kv_heads: int, page_size: int, bos: int, eos: int, p: float,
    softmax_scale: float | None, pdl: bool = False,
) -> None:  # fmt: skip
    """y = x at the fewest scored pages of fp32 ``[R, n, W]`` with mass of at least p of the whole, else -inf.

    Mass is softmax(softmax_scale * x), or x itself where that is None. Ties go to the lower page. y may be x.
    """
    _launch_filter(x, y, seq_lens, num_kv_heads, page_size, bos, eos, k=None, p=p, softmax_scale=softmax_scale, pdl=pdl)


def _launch_filter(
    x: Any, y: Any, seq_lens: Any, num_kv_heads: int, page_size: int, bos: int, eos: int, *,
    k: int | None, p: float, softmax_scale: float | None, pdl: bool,
) -> None:  # fmt: skip
    rows, planes, width = x.shape
    block, warps = _block(width)
    filter_kernel[(rows * planes,)](
        x, y, seq_lens, *x.stride(), *y.stride(), width, bos, eos, float(width if k is None else min(k, width)), p,
        (softmax_scale or 0.0) * 1.4426950408889634,
        H=num_kv_heads, PLANES=planes, PAGE=page_size, COUNT=k is not None, SOFTMAX=softmax_scale is not None, BW=block,
        num_warps=warps, num_stages=1,
        **options(pdl),
    )  # fmt: skip


def _block(width: int) -> tuple[int, int]:
    """(pages a block, warps)."""
    block = min(_BLOCK, triton.next_power_of_2(max(width, 32)))
    return block, min(16, max(1, block // (32 * _VALUES_PER_THREAD)))
