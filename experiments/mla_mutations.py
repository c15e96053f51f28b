"""Bugs that chunked prefill has had in public systems, put into flowlib's loop one at a time.

Each is a context manager that replaces a piece of the loop; the error that it makes in a case shows whether the gate
would notice. ``KNOWN`` holds the errors that the same bugs made in a float64 model of the loop as vLLM orders it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from mla_cases import DEEPSEEK, Problem

from flowlib import mla
from flowlib.mla import attention, prefill

CASES = ("single", "three", "edges", "no-ctx", "ragged")
KNOWN = {
    "last chunk dropped": (1.12, 0.101, 0.031, 0.070, 0.053),
    "base-2 log-sum-exp": (0.052, 0.020, 0.035, 0.035, 0.078),
    "log-sum-exp not updated": (0.0, 0.072, 0.049, 0.010, 0.106),
    "finite log-sum-exp without keys": (0.0, 0.0, 0.0025, 0.0, 0.060),
    "rope part zeroed": (0.091, 0.046, 0.057, 0.051, 0.119),
    "new tokens not causal": (0.10, 0.037, 0.042, 1.4, 0.23),
    "start off by a page": (0.0, 0.095, 0.144, 0.096, 0.184),
}
"""Largest error in each of ``CASES``."""
ORDER_FREE = frozenset(KNOWN) - {"log-sum-exp not updated", "finite log-sum-exp without keys"}
"""Those that make the same error in flowlib's order: new tokens first, only requests with context in a chunk."""


def _on_run(change: Callable[..., None]) -> Any:
    """Replaces the attention; `change` gets it and its arguments."""
    stock = attention.run
    return mock.patch.object(attention, "run", lambda *args: change(stock, *args))


def _last_chunk_dropped() -> Any:
    stock = prefill._Loop.add

    def add(self: Any, i: int, *buffers: torch.Tensor) -> None:
        if i < self.context.num_chunks - 1:
            stock(self, i, *buffers)

    return mock.patch.object(prefill._Loop, "add", add)


def _base_2(run: Callable[..., None], *args: Any) -> None:
    run(*args)
    args[-1].div_(math.log(2.0))


def _not_updated() -> Any:
    stock = prefill.merge_attn_states

    def merge(*args: Any, out_lse: torch.Tensor, **options: Any) -> None:
        stock(*args, **options)

    return mock.patch.object(prefill, "merge_attn_states", merge)


def _finite(run: Callable[..., None], *args: Any) -> None:
    run(*args)
    args[-1].masked_fill_(args[-1] == float("-inf"), 0.0)


def _on_gather(change: Callable[..., None]) -> Any:
    """Replaces the gather; `change` gets it and its arguments."""
    stock = prefill.gather_latent
    return mock.patch.object(prefill, "gather_latent", lambda *args: change(stock, *args))


def _no_rope(gather: Callable[..., torch.Tensor], *args: Any) -> None:
    gather(*args)[:, DEEPSEEK.rank :] = 0.0


def _page_too_early(gather: Callable[..., torch.Tensor], *args: Any) -> None:
    cache, *index, starts, impl = args
    gather(cache, *index, (starts - cache.shape[1]).clamp(min=0), impl)


def _not_causal(run: Callable[..., None], *args: Any) -> None:
    run(*args[:-3], False, *args[-2:])


MUTATIONS: dict[str, Callable[[], Any]] = {
    "last chunk dropped": _last_chunk_dropped,
    "base-2 log-sum-exp": lambda: _on_run(_base_2),
    "log-sum-exp not updated": _not_updated,
    "finite log-sum-exp without keys": lambda: _on_run(_finite),
    "rope part zeroed": lambda: _on_gather(_no_rope),
    "new tokens not causal": lambda: _on_run(_not_causal),
    "start off by a page": lambda: _on_gather(_page_too_early),
}


@contextmanager
def mutated(name: str) -> Iterator[None]:
    """flowlib's loop with one of ``MUTATIONS`` in it."""
    with MUTATIONS[name]():
        yield


def run(made: Problem, schedule: str = "packed", impl: str = "reference", **options: Any) -> mla.PrefillOutput:
    """Chunked prefill of a problem."""
    case = made.case
    context = mla.build_chunked_context(
        case.context, case.query_start_loc, case.workspace, case.page, schedule, made.q.device
    )
    return mla.chunked_prefill(
        made.q, made.k, made.v, made.cache, made.block_table, context, made.up_project, scale=case.sizes.scale,
        impl=impl, **options,
    )  # fmt: skip
