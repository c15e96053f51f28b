"""Attention inside the loop over chunks: one function, three ways to compute it, one log-sum-exp."""

from __future__ import annotations

import torch

from flowlib.compiler.load import load_function
from flowlib.core.errors import BackendError, FormatError, OptionError
from flowlib.mla import flashinfer_ragged
from flowlib.mla.checks import check_impl, check_tensor, check_writable
from flowlib.mla.lse_base import lse_factor
from flowlib.mla.ragged import RaggedBatch

ATTENTION = ("auto", "flashinfer", "triton", "reference")
_LAUNCH = "flowlib.kernels.mla_attend:launch_attend_ragged"
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_SCORES = 1 << 24


def resolve_attention(
    attention: str, impl: str, dtype: torch.dtype, head_dims: tuple[int, int], device: str | torch.device
) -> str:
    """The attention that a name stands for.

    ``"auto"`` is the reference with ``impl="reference"``; else FlashInfer where it is installed and serves these sizes
    on this device, else flowlib's own Triton kernel.

    Args:
        attention: ``"auto"``, ``"flashinfer"``, ``"triton"`` or ``"reference"``.
        impl: ``"reference"`` or ``"triton"``, of everything else.
        dtype: of q, k and v.
        head_dims: ``(D, Dv)``.
        device: where they lie.

    Raises:
        OptionError: none of these. BackendError: asked for by name and not possible here, with the reason.
    """
    device = torch.device(device)
    if attention not in ATTENTION:
        raise OptionError(f"attention is {attention!r}, expected one of {', '.join(map(repr, ATTENTION))}")
    if attention == "auto" and impl == "reference":
        return "reference"
    reason = flashinfer_ragged.unavailable(dtype, head_dims, device) if attention in ("auto", "flashinfer") else ""
    if attention == "auto":
        attention = "triton" if reason else "flashinfer"
    elif reason:
        raise BackendError(f"attention='flashinfer' {reason}")
    if attention == "triton":
        check_impl("attention='triton'", "triton", device)
    return attention


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch: RaggedBatch,
    *,
    scale: float,
    causal: bool,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    attention: str = "auto",
    impl: str = "reference",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of each request's queries over its own keys.

    A causal batch is aligned at the bottom right: with m queries and n keys, query j sees keys ``0 .. n - m + j``.
    A query that sees no key gives output 0 and log-sum-exp -inf, whatever the kernel behind does. Before a kernel is
    used for the first time on a device its log-sum-exp is measured on known scores (see
    :func:`flowlib.mla.check_lse_base`); one to base 2 is converted, any other refused.

    Args:
        q: ``[Tq, H, D]``; k ``[Tk, H, D]``; v ``[Tk, H, Dv]``: one dtype, any strides.
        batch: which rows belong together.
        scale: factor of q . k, whatever it contains (YaRN's too): it holds for outputs and log-sum-exp alike.
        causal: whether queries are the last tokens of their request.
        out: ``[Tq, H, Dv]``, any strides and floating dtype; ``None`` makes one in q's dtype.
        lse: fp32 ``[Tq, H]`` (fp64 with fp64 inputs), any strides, natural logarithm; ``None`` makes one.
        attention: ``"auto"``, ``"flashinfer"``, ``"triton"`` or ``"reference"``.
        impl: what ``"auto"`` chooses for, see :func:`resolve_attention`.

    Returns:
        `out` and `lse`.

    Raises:
        ShapeError, FormatError, BatchError, OptionError, BackendError: before anything runs.
    """
    what = "varlen_attention"
    if not isinstance(batch, RaggedBatch):
        raise FormatError(f"{what}: batch is {type(batch).__name__}, expected a flowlib.mla.RaggedBatch")
    check_qkv(what, q, k, v, batch.num_queries, batch.num_keys)
    if not isinstance(scale, (int, float)):
        raise FormatError(f"{what}: scale is {type(scale).__name__}, expected a number")
    shape = (q.shape[0], q.shape[1], v.shape[2])
    wide = torch.float64 if q.dtype is torch.float64 else torch.float32
    out = torch.empty(shape, dtype=q.dtype, device=q.device) if out is None else out
    lse = torch.empty(shape[:2], dtype=wide, device=q.device) if lse is None else lse
    check_tensor(what, "out", out, "Tq H Dv", shape, _FLOATS, q.device)
    check_tensor(what, "lse", lse, "Tq H", shape[:2], wide, q.device)
    check_writable(what, "out", out)
    check_writable(what, "lse", lse)
    name = resolve_attention(attention, impl, q.dtype, (q.shape[2], v.shape[2]), q.device)
    if name == "triton" and wide is torch.float64:
        raise FormatError(f"{what}: float64 inputs are for attention='reference'; the kernels compute in fp32")
    run(name, q, k, v, batch, float(scale), causal, out, lse)
    return out, lse


def check_lse_base(
    attention: str = "auto",
    impl: str = "triton",
    dtype: torch.dtype = torch.bfloat16,
    head_dims: tuple[int, int] = (192, 128),
    device: str | torch.device = "cuda",
) -> float:
    """The start-up check of the kernel that prefill will use: a key's log-sum-exp must be its score.

    :func:`chunked_prefill` and :func:`varlen_attention` do the same at first use; called at start, nothing waits later.

    Args:
        attention, impl, dtype, head_dims, device: as for :func:`resolve_attention`.

    Returns:
        What the kernel's log-sum-exp is multiplied with to be natural: 1, or ln 2 where it is to base 2.

    Raises:
        BackendError: it is neither, or part of the scale is missing from it; or the attention is not possible here.
        OptionError: unknown attention.
    """
    device = torch.device(device)
    name = resolve_attention(attention, impl, dtype, head_dims, device)
    return lse_factor(name, RUNNERS[name], device, dtype, head_dims)


def run(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: RaggedBatch, scale: float, causal: bool,
    out: torch.Tensor, lse: torch.Tensor,
) -> None:  # fmt: skip
    """:func:`varlen_attention` by its resolved name, unchecked."""
    if batch.max_query_len == 0:
        return
    factor = lse_factor(name, RUNNERS[name], q.device, q.dtype, (q.shape[2], v.shape[2]))
    RUNNERS[name](q, k, v, batch, scale, causal, out, lse)
    if factor != 1.0:
        lse.mul_(factor)
    if name in _FOREIGN:
        for first, end in batch.unseeing(causal):
            out[first:end] = 0.0
            lse[first:end] = float("-inf")


def check_qkv(
    what: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_queries: int, num_keys: int
) -> None:
    """Raises unless q, k and v fit each other and the rows of a batch."""
    check_tensor(what, "q", q, "Tq H D", (num_queries, None, None), _FLOATS)
    check_tensor(what, "k", k, "Tk H D", (num_keys, *q.shape[1:]), q.dtype, q.device)
    check_tensor(what, "v", v, "Tk H Dv", (num_keys, q.shape[1], None), q.dtype, q.device)
    if not (q.shape[1] and q.shape[2] and v.shape[2]):
        raise FormatError(f"{what}: q is {list(q.shape)}, v {list(v.shape)}, expected at least one head and lane")


def reference_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: RaggedBatch, scale: float, causal: bool,
    out: torch.Tensor, lse: torch.Tensor,
) -> None:  # fmt: skip
    """The formula in torch: fp32, float64 for float64 inputs; queries in blocks, so that scores stay small."""
    wide = torch.float64 if q.dtype is torch.float64 else torch.float32
    for i in range(batch.size):
        (q0, q1), (k0, k1) = batch.query_offsets[i : i + 2], batch.kv_offsets[i : i + 2]
        keys, values = k[k0:k1].to(wide).transpose(0, 1), v[k0:k1].to(wide).transpose(0, 1)
        block = max(1, _SCORES // max(1, (k1 - k0) * q.shape[1]))
        for first in range(q0, q1, block):
            rows = slice(first, min(first + block, q1))
            scores = q[rows].to(wide).transpose(0, 1) @ keys.transpose(1, 2) * scale
            if causal:
                seen = torch.arange(rows.start, rows.stop, device=q.device) - q1 + (k1 - k0)
                hidden = torch.arange(k1 - k0, device=q.device) > seen[:, None]
                scores = scores.masked_fill(hidden, float("-inf"))
            total = torch.logsumexp(scores, 2) if k1 > k0 else scores.new_full(scores.shape[:2], float("-inf"))
            weights = (scores - torch.where(total.isinf(), 0.0, total)[..., None]).exp()
            out[rows] = (weights @ values).transpose(0, 1).to(out.dtype)
            lse[rows] = total.t()


def _triton_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: RaggedBatch, scale: float, causal: bool,
    out: torch.Tensor, lse: torch.Tensor,
) -> None:  # fmt: skip
    load_function(_LAUNCH)(
        q, k, v, batch.query_start_loc, batch.kv_start_loc, out, lse, scale=scale, causal=causal,
        max_query_len=batch.max_query_len,
    )  # fmt: skip


RUNNERS = {
    "reference": reference_attention,
    "triton": _triton_attention,
    "flashinfer": flashinfer_ragged.attention,
}
"""By resolved name: functions that write outputs and the log-sum-exp as their kernel has it."""
_FOREIGN = frozenset({"flashinfer"})
"""Those whose results for queries without keys are not relied on."""
