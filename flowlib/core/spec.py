"""The frozen numbers a flow is compiled for."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flowlib.core.errors import OptionError
from flowlib.core.float8 import SCALE_EXPONENTS, is_scale

RATIO_ONE = 1 << 16
"""Fixed-point one of ``top_k_ratio``: budgets are computed in integers, so that every mode agrees on them."""
KV_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
SUMMARY_DTYPES = KV_DTYPES
MAX_PAGE_SIZE = 128
MAX_PAGES = 1 << 30
"""Bound of all page counts: kernels add a few of them in int32."""
MAX_TOKENS = (1 << 31) - 1
"""Bound of ``dense_below``: lengths are int32."""


@dataclass(frozen=True)
class Spec:
    """What a flow is compiled for.

    Args:
        page_size: tokens per page, 1 to 128.
        head_dim: size of a key and of a query head.
        v_head_dim: size of a value head; ``None`` means ``head_dim``.
        group_size: query heads per kv head (``H_q / H_kv``).
        num_kv_heads: kv heads of one layer (on this device).
        kv_dtype: dtype of the K/V pool: bfloat16, float16, float32 or float8_e4m3fn.
        scale: factor of q·k in attention; ``None`` means ``head_dim ** -0.5``.
        top_k: pages chosen per row besides the reserved ones.
        top_k_ratio: share of a row's pages chosen; the larger of both budgets counts.
        bos, eos: first and last pages of a row, always attended and never scored; ``eos >= 1``.
        max_pages: most pages of one row.
        max_batch: most rows' requests in one step.
        alibi_slopes: one slope per query head, or ``None``: adds ``slope * (position - query position)``.
        k_scale, v_scale: what stored K and V are multiplied by (float8 pools).
        dense_below: rows of at most this many tokens are attended in full.
        summary_dtype: dtype of summary fields that are declared without one: float8_e4m3fn (maxima are rounded up and
            minima down, so that a bound stays one), bfloat16, float16 or float32; ``None`` means ``field_dtype``.
            State fields never have it.
        summary_scale: what float8 summaries are multiplied by, a power of two; a pool may have one per kv head.
        kv_lora_rank: makes it a spec of multi-head latent attention (MLA): a token's latent has ``head_dim`` channels,
            ``kv_lora_rank`` of content, which are its value, too, and the rest of rope. Then ``num_kv_heads`` is 1, all
            query heads are one group, and `scale` must be given: absorbed queries have lost the size it comes from.

    Raises:
        OptionError: a number is out of range; the message names it.
    """

    page_size: int = 16
    head_dim: int = 128
    v_head_dim: int | None = None
    group_size: int = 4
    num_kv_heads: int = 2
    kv_dtype: torch.dtype = torch.bfloat16
    scale: float | None = None
    top_k: int = 8
    top_k_ratio: float = 0.0
    bos: int = 1
    eos: int = 1
    max_pages: int = 256
    max_batch: int = 8
    alibi_slopes: Sequence[float] | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0
    dense_below: int = 0
    summary_dtype: torch.dtype | None = None
    summary_scale: float = 1.0
    kv_lora_rank: int | None = None

    def __post_init__(self) -> None:
        self._check_integers()
        if not (_is_number(self.top_k_ratio) and 0.0 <= self.top_k_ratio <= 1.0):
            raise OptionError(f"Spec: top_k_ratio is {self.top_k_ratio!r}, expected a number from 0 to 1")
        _one_of("kv_dtype", self.kv_dtype, KV_DTYPES)
        self._check_summaries()
        for name in ("scale", "k_scale", "v_scale"):
            value = getattr(self, name)
            if name == "scale" and value is None:
                continue
            if not (_is_number(value) and 0 < value < math.inf):
                raise OptionError(f"Spec: {name} is {value!r}, expected a positive finite number")
        if self.alibi_slopes is not None:
            object.__setattr__(self, "alibi_slopes", _slopes(self.alibi_slopes, self.num_heads))
        if self.kv_lora_rank is not None:
            self._check_latent(self.kv_lora_rank)

    def _check_integers(self) -> None:
        _integer_in("page_size", self.page_size, 1, MAX_PAGE_SIZE)
        for name in ("head_dim", "group_size", "num_kv_heads", "max_batch"):
            _integer_in(name, getattr(self, name), 1, None)
        if self.v_head_dim is not None:
            _integer_in("v_head_dim", self.v_head_dim, 1, None)
        _integer_in("max_pages", self.max_pages, 1, MAX_PAGES)
        for name in ("top_k", "bos"):
            _integer_in(name, getattr(self, name), 0, MAX_PAGES)
        _integer_in("eos", self.eos, 1, MAX_PAGES, "the unfinished last page has no summary, so it can't be scored")
        _integer_in("dense_below", self.dense_below, 0, MAX_TOKENS)

    def _check_latent(self, rank: int) -> None:
        _integer_in("kv_lora_rank", rank, 1, None)
        if rank > self.head_dim:
            raise OptionError(
                f"Spec: kv_lora_rank is {rank}, expected at most head_dim {self.head_dim} "
                "(head_dim = kv_lora_rank + qk_rope_head_dim)"
            )
        of_latent = "V is the first kv_lora_rank channels of the latent"
        needs = {
            "v_head_dim": (self.v_head_dim in (None, rank), f"None or {rank}: {of_latent}"),
            "num_kv_heads": (self.num_kv_heads == 1, "1: all query heads share one latent"),
            "scale": (self.scale is not None, "that of the model, such as (128 + 64) ** -0.5 times its mscale ** 2"),
            "v_scale": (self.v_scale == self.k_scale, f"k_scale, {self.k_scale}: {of_latent}"),
            "alibi_slopes": (self.alibi_slopes is None, "None: positions are in the latent's rope channels"),
        }
        for name, (right, wanted) in needs.items():
            if not right:
                value = getattr(self, name)
                raise OptionError(
                    f"Spec: {name} is {value!r}, expected {wanted} (kv_lora_rank is {rank}, so this is MLA)"
                )

    def _check_summaries(self) -> None:
        if self.summary_dtype is not None:
            _one_of("summary_dtype", self.summary_dtype, SUMMARY_DTYPES)
        scale = self.summary_scale
        if not (_is_number(scale) and is_scale(scale)):
            low, high = SCALE_EXPONENTS
            raise OptionError(f"Spec: summary_scale is {scale!r}, expected a power of two from 2**{low} to 2**{high}")
        if scale != 1 and self.summary_dtype is not torch.float8_e4m3fn:
            raise OptionError(
                f"Spec: summary_scale is {scale!r}, expected 1.0 beside summary_dtype {self.summary_dtype}: "
                "only float8_e4m3fn summaries are scaled"
            )

    @property
    def num_heads(self) -> int:
        """Query heads, ``group_size * num_kv_heads``."""
        return self.group_size * self.num_kv_heads

    @property
    def dv(self) -> int:
        """Size of a value head."""
        if self.kv_lora_rank is not None:
            return self.kv_lora_rank
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def is_mla(self) -> bool:
        """Whether K and V are one latent."""
        return self.kv_lora_rank is not None

    @property
    def softmax_scale(self) -> float:
        """The factor of q·k in attention."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def field_dtype(self) -> torch.dtype:
        """dtype of a field declared without one: the pool's, bfloat16 beside a float8 pool."""
        return torch.bfloat16 if self.kv_dtype is torch.float8_e4m3fn else self.kv_dtype

    @property
    def ratio_q16(self) -> int:
        """``top_k_ratio`` as a 16-bit fixed-point number."""
        return round(self.top_k_ratio * RATIO_ONE)

    def budget(self, num_pages: int) -> int:
        """Pages chosen for a row of `num_pages` pages, the reserved ones not counted."""
        return max(self.top_k, (num_pages * self.ratio_q16) >> 16)

    def replace(self, **changes: object) -> Spec:
        """A copy with some numbers changed."""
        return dataclasses.replace(self, **changes)


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _one_of(name: str, dtype: object, known: Sequence[torch.dtype]) -> None:
    if dtype not in known:
        names = ", ".join(str(t).removeprefix("torch.") for t in known)
        raise OptionError(f"Spec: {name} is {dtype!r}, expected one of {names}")


def _slopes(given: object, num_heads: int) -> tuple[float, ...]:
    try:
        slopes = tuple(float(s) for s in given)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        slopes = (math.nan,)
    if not all(map(math.isfinite, slopes)):
        raise OptionError(f"Spec: alibi_slopes is {given!r}, expected {num_heads} finite numbers, one per query head")
    if len(slopes) != num_heads:
        raise OptionError(f"Spec: alibi_slopes has {len(slopes)} values, expected {num_heads}, one per query head")
    return slopes


def _integer_in(name: str, value: object, low: int, high: int | None, why: str = "") -> None:
    wanted = f"an integer from {low} to {high}" if high is not None else f"an integer of at least {low}"
    reason = f" ({why})" if why else ""
    if isinstance(value, bool) or not isinstance(value, int):
        raise OptionError(f"Spec: {name} is {value!r}, expected {wanted}{reason}")
    if value < low or (high is not None and value > high):
        raise OptionError(f"Spec: {name} is {value}, expected {wanted}{reason}")
