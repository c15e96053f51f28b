"""Joining two attentions over disjoint keys by their log-sum-exp."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flowlib.compiler.load import load_function
from flowlib.core.errors import BatchError, FormatError, OptionError
from flowlib.mla.checks import check_impl, check_tensor, check_writable

_LAUNCH = "flowlib.kernels.mla_merge:launch_merge"
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def merge_attn_states(
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
    out: torch.Tensor | None = None,
    out_lse: torch.Tensor | None = None,
    prefill_tokens_with_context: int | None = None,
    output_scale: float = 1.0,
    impl: str = "reference",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention over prefix and suffix keys, from attention over each: outputs weighted by e^lse.

    A log-sum-exp of +inf means -inf (FlashAttention 2 writes it where there is no key). Where both are -inf the output
    is the prefix's and the log-sum-exp -inf. A side whose log-sum-exp is -inf is not read otherwise, so it may hold
    anything. Weights are normalised before they meet an output; arithmetic is fp32 (float64 for float64 outputs, in
    the reference). Merging in several steps, in any order, gives the same.

    Args:
        prefix_output, suffix_output: ``[T, H, D]``.
        prefix_lse, suffix_lse: fp32 ``[T, H]``, natural logarithm. For a tensor laid out ``[H, T]`` pass ``lse.t()``.
        out: ``[T, H, D]``, any floating dtype, float8 too; ``None`` makes one in the suffix's dtype. It may be
            `prefix_output` or `suffix_output` itself, but no other view of their memory.
        out_lse: like the others' ``[T, H]``; ``None`` makes none. May be one of them likewise.
        prefill_tokens_with_context: tokens from here on have no prefix: their suffix is copied, its log-sum-exp as it
            is, and their prefix is not read. ``None`` means all have one.
        output_scale: outputs are divided by it, then saturate where `out` is float8.
        impl: ``"reference"`` or ``"triton"``.

    Every tensor has strides of its own, all of them free.

    Returns:
        `out` and `out_lse`.

    Raises:
        ShapeError, FormatError, BatchError, OptionError, BackendError: before anything is written.
    """
    what = "merge_attn_states"
    wide = _check_inputs(prefix_output, prefix_lse, suffix_output, suffix_lse)
    shape, device = suffix_output.shape, suffix_output.device
    out = torch.empty(shape, dtype=suffix_output.dtype, device=device) if out is None else out
    check_tensor(what, "out", out, "T H D", shape, (*_FLOATS, *_FP8), device)
    _check_target("out", out, {"prefix_output": prefix_output, "suffix_output": suffix_output})
    if out_lse is not None:
        _check_lse("out_lse", out_lse, shape, wide, device)
        _check_target("out_lse", out_lse, {"prefix_lse": prefix_lse, "suffix_lse": suffix_lse})
    limit = _limit(prefill_tokens_with_context, shape[0])
    if not isinstance(output_scale, (int, float)) or not 0 < output_scale < float("inf"):
        raise OptionError(f"{what}: output_scale is {output_scale!r}, expected a number above 0")
    check_impl(what, impl, device)
    if out.numel() == 0:
        return out, out_lse
    bound = torch.finfo(out.dtype).max if out.dtype in _FP8 else 0.0
    if impl == "triton":
        if wide is torch.float64:
            raise FormatError(f"{what}: float64 outputs are for impl='reference'; impl='triton' computes in fp32")
        load_function(_LAUNCH)(
            prefix_output, prefix_lse, suffix_output, suffix_lse, out, out_lse, limit, 1.0 / output_scale, bound
        )
        return out, out_lse
    merged, lse = _merged(prefix_output, prefix_lse, suffix_output, suffix_lse, limit, wide)
    merged = merged / output_scale
    out.copy_(merged.clamp(-bound, bound) if bound else merged)
    return out, None if out_lse is None else out_lse.copy_(lse)


def _merged(
    prefix: torch.Tensor, prefix_lse: torch.Tensor, suffix: torch.Tensor, suffix_lse: torch.Tensor, limit: int,
    wide: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    with_prefix = (torch.arange(len(prefix), device=prefix.device) < limit)[:, None]
    nothing = float("-inf")
    p, s = (torch.where(lse == float("inf"), nothing, lse) for lse in (prefix_lse, suffix_lse))
    top = torch.maximum(p, s)
    none = top == nothing
    base = torch.where(none, 0.0, top)
    total = (p - base).exp() + (s - base).exp()
    lse = torch.where(none, nothing, total.log() + base)
    total = torch.where(none, 1.0, total)
    weights = torch.where(none, 1.0, (p - base).exp() / total), (s - base).exp() / total
    parts = [torch.where((w == 0)[..., None], 0.0, x.to(wide) * w[..., None]) for w, x in zip(
        weights, (prefix, suffix), strict=True)]  # fmt: skip
    o = torch.where(with_prefix[..., None], parts[0] + parts[1], suffix.to(wide))
    return o, torch.where(with_prefix, lse, suffix_lse)


def _check_inputs(
    prefix: torch.Tensor, prefix_lse: torch.Tensor, suffix: torch.Tensor, suffix_lse: torch.Tensor
) -> torch.dtype:
    """What to compute in."""
    check_tensor("merge_attn_states", "suffix_output", suffix, "T H D", (None, None, None), _FLOATS)
    check_tensor("merge_attn_states", "prefix_output", prefix, "T H D", suffix.shape, _FLOATS, suffix.device)
    wide = torch.float64 if torch.float64 in (prefix.dtype, suffix.dtype) else torch.float32
    _check_lse("prefix_lse", prefix_lse, suffix.shape, wide, suffix.device)
    _check_lse("suffix_lse", suffix_lse, suffix.shape, wide, suffix.device)
    return wide


def _limit(given: int | None, tokens: int) -> int:
    if given is None:
        return tokens
    if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given <= tokens:
        raise OptionError(
            f"merge_attn_states: prefill_tokens_with_context is {given!r}, expected from 0 to {tokens}, the tokens"
        )
    return given


def _check_lse(
    name: str, lse: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> None:
    tokens, heads = shape[:2]
    if isinstance(lse, torch.Tensor) and tuple(lse.shape) == (heads, tokens) != (tokens, heads):
        raise FormatError(
            f"merge_attn_states: {name} is {list(lse.shape)}, expected [{tokens}, {heads}] [T, H]; it looks laid out "
            f"by heads: pass {name}.t()"
        )
    check_tensor("merge_attn_states", name, lse, "T H", (tokens, heads), dtype, device)


def _check_target(name: str, out: torch.Tensor, inputs: dict[str, torch.Tensor]) -> None:
    """Refuses an output that shares memory with an input, unless it is that input."""
    check_writable("merge_attn_states", name, out)
    for other, value in inputs.items():
        same = out.data_ptr() == value.data_ptr() and out.stride() == value.stride() and out.dtype == value.dtype
        if same or out.untyped_storage().data_ptr() != value.untyped_storage().data_ptr():
            continue
        (first, end), (start, stop) = _extent(out), _extent(value)
        if first < stop and start < end:
            raise BatchError(
                f"merge_attn_states: {name} lies among the memory of {other}; expected memory of its own, or {other} "
                "itself"
            )


def _extent(value: torch.Tensor) -> tuple[int, int]:
    """First byte and end of what a tensor spans."""
    if value.numel() == 0:
        return 0, 0
    last = sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    return value.data_ptr(), value.data_ptr() + (last + 1) * value.element_size()
