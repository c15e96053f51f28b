"""The page table of a step, read off the serving engine's token table on the device."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def page_table_kernel(
    p_req_to_token, p_req_pool_indices, p_seq_lens, p_table, s_req, s_table, context, W,
    PAGE: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    i_b = tl.program_id(0).to(tl.int64)
    o_w = tl.program_id(1) * BW + tl.arange(0, BW)
    n_pages = (tl.minimum(tl.load(p_seq_lens + i_b).to(tl.int64), context) + PAGE - 1) // PAGE
    m_w = o_w < tl.minimum(n_pages, W)
    i_req = tl.load(p_req_pool_indices + i_b).to(tl.int64)
    # [BW]
    b_slot = tl.load(p_req_to_token + i_req * s_req + o_w.to(tl.int64) * PAGE, mask=m_w, other=0)
    tl.store(p_table + i_b * s_table + o_w, (b_slot // PAGE).to(tl.int32), mask=m_w)


def launch_page_table(
    req_to_token: Any, req_pool_indices: Any, seq_lens: Any, page_table: Any, *, page_size: int
) -> None:
    """``page_table[b, j] = req_to_token[req_pool_indices[b], j * page_size] // page_size`` for the pages of every row.

    Args:
        req_to_token: int32 or int64 ``[requests, context]``, token slots, last axis contiguous.
        req_pool_indices: int32 or int64 ``[bs]``.
        seq_lens: int32 or int64 ``[bs]``, tokens.
        page_table: int32 ``[bs, W]``, last axis contiguous. Entries past a row's pages are left alone.
    """
    rows, width = page_table.shape
    block = min(_BLOCK, triton.next_power_of_2(max(width, 32)))
    page_table_kernel[(rows, triton.cdiv(width, block))](
        req_to_token, req_pool_indices, seq_lens, page_table, req_to_token.stride(0), page_table.stride(0),
        req_to_token.shape[1], width, PAGE=page_size, BW=block, num_warps=4, num_stages=1,
    )  # fmt: skip
