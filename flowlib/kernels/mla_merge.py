"""Two partial attentions over disjoint keys made one, weighted by their log-sum-exp."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

_BLOCK = 4096


@triton.jit(
    do_not_specialize=[
        "n_rows", "n_merged", "s_pl_t", "s_pl_h", "s_sl_t", "s_sl_h", "s_ol_t", "s_ol_h", "out_factor",
    ],
    do_not_specialize_on_alignment=["p_pl", "p_sl", "p_ol"],
)  # fmt: skip
def merge_states_kernel(
    p_p, p_pl, p_s, p_sl, p_o, p_ol, n_rows, n_merged, out_factor,
    s_p_t, s_p_h, s_p_d, s_pl_t, s_pl_h, s_s_t, s_s_h, s_s_d, s_sl_t, s_sl_h, s_o_t, s_o_h, s_o_d, s_ol_t, s_ol_h,
    H: tl.constexpr, D: tl.constexpr, LIMIT: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    o_r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    o_t, o_h = o_r // H, o_r % H
    m_r, m_both = o_r < n_rows, o_t < n_merged
    o_d = tl.arange(0, BD).to(tl.int64)[None, :]
    # [BR]
    b_sl = tl.load(p_sl + o_t * s_sl_t + o_h * s_sl_h, mask=m_r, other=float("-inf"))
    # [BR]
    b_pl = tl.load(p_pl + o_t * s_pl_t + o_h * s_pl_h, mask=m_r & m_both, other=float("-inf"))
    b_ps = tl.where(b_pl == float("inf"), float("-inf"), b_pl)
    b_ss = tl.where(b_sl == float("inf"), float("-inf"), b_sl)
    b_max = tl.maximum(b_ps, b_ss)
    m_none = b_max == float("-inf")  # no key on either side: the prefix's output stands
    b_base = tl.where(m_none, 0.0, b_max)
    b_pw, b_sw = tl.exp(b_ps - b_base), tl.exp(b_ss - b_base)
    b_sum = b_pw + b_sw
    b_lse = tl.where(m_none, float("-inf"), tl.log(b_sum) + b_base)
    b_sum = tl.where(m_none, 1.0, b_sum)
    m_alone = m_r & (o_t >= n_merged)
    b_pw = tl.where(m_alone, 0.0, tl.where(m_none, 1.0, b_pw / b_sum))
    b_sw = tl.where(m_alone, 1.0, b_sw / b_sum)

    m_d = m_r[:, None] & (o_d < D)
    # [BR, BD]; a side of weight 0 may hold anything and is not read
    b_p = tl.load(
        p_p + o_t[:, None] * s_p_t + o_h[:, None] * s_p_h + o_d * s_p_d, mask=m_d & (b_pw != 0.0)[:, None], other=0.0
    )
    # [BR, BD]
    b_s = tl.load(
        p_s + o_t[:, None] * s_s_t + o_h[:, None] * s_s_h + o_d * s_s_d, mask=m_d & (b_sw != 0.0)[:, None], other=0.0
    )
    b_o = (b_p.to(tl.float32) * b_pw[:, None] + b_s.to(tl.float32) * b_sw[:, None]) * out_factor
    if LIMIT > 0:
        b_o = tl.minimum(tl.maximum(b_o, -LIMIT), LIMIT)
    tl.store(p_o + o_t[:, None] * s_o_t + o_h[:, None] * s_o_h + o_d * s_o_d, b_o.to(p_o.dtype.element_ty), mask=m_d)
    if p_ol is not None:
        tl.store(p_ol + o_t * s_ol_t + o_h * s_ol_h, tl.where(m_alone, b_sl, b_lse), mask=m_r)


def launch_merge(
    prefix: Any, prefix_lse: Any, suffix: Any, suffix_lse: Any, out: Any, out_lse: Any, n_merged: int,
    out_factor: float = 1.0, limit: float = 0.0,
) -> None:  # fmt: skip
    """Merges the first `n_merged` tokens and copies the suffix of the others.

    Args:
        prefix, suffix, out: ``[T, H, D]``, any strides and floating dtypes. `out` may be `prefix` or `suffix` itself.
        prefix_lse, suffix_lse: fp32 ``[T, H]``, any strides; out_lse too, or None.
        n_merged: a run-time value: another one compiles nothing.
        out_factor: what outputs are multiplied with before they are stored; limit: largest size stored, 0 for any.
    """
    tokens, heads, size = out.shape
    lanes = triton.next_power_of_2(size)
    rows = max(1, _BLOCK // lanes)
    lse_strides = (0, 0) if out_lse is None else out_lse.stride()
    merge_states_kernel[(triton.cdiv(tokens * heads, rows),)](
        prefix, prefix_lse, suffix, suffix_lse, out, out_lse, tokens * heads, n_merged, out_factor,
        *prefix.stride(), *prefix_lse.stride(), *suffix.stride(), *suffix_lse.stride(), *out.stride(), *lse_strides,
        H=heads, D=size, LIMIT=limit, BR=rows, BD=lanes, num_warps=4,
    )  # fmt: skip
