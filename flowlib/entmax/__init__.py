"""Entmax attention over a paged KV cache: functions on tensors, in torch, in any dtype up to float64.

Entmax gives exact zeros, so a selection that holds every token with mass gives the output of the whole cache, not an
approximation; :func:`certified_exact` says when it does. See :class:`flowlib.PagedKVCache` for a cache to decode over.
"""

from flowlib.entmax.attention import Attended, entmax_attention
from flowlib.entmax.cache import PagedKVCache
from flowlib.entmax.decode import DecodeInfo, gaussian_decode, topk_decode
from flowlib.entmax.gaussian import gaussian_select, gaussian_tau
from flowlib.entmax.pages import PageStats, page_bounds, page_moments, page_stats
from flowlib.entmax.selection import Selection, certified_exact, certified_skip, topk_select
from flowlib.entmax.solver import entmax

__all__ = [
    "Attended",
    "DecodeInfo",
    "PageStats",
    "PagedKVCache",
    "Selection",
    "certified_exact",
    "certified_skip",
    "entmax",
    "entmax_attention",
    "gaussian_decode",
    "gaussian_select",
    "gaussian_tau",
    "page_bounds",
    "page_moments",
    "page_stats",
    "topk_decode",
    "topk_select",
]
