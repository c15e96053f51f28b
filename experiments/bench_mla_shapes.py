"""What `bench_mla.py` measures: prefill shapes, schedules, and decode workloads over latents."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from bench_shapes import BenchError, FlowChoice, Numbers, Workload, canonical, parse_shape
from mla_cases import DEEPSEEK, Sizes

import flowlib

WORKSPACE_ROWS = 65536
SGLANG_CAPACITY = 131072
"""Context rows of all requests in one chunk of SGLang's loop."""
PREFILL_CONTEXTS = (60_000, 8 * 1024, 32 * 1024, 128 * 1024)
PREFILL_NEW = (4096, 512)
HEADS = (16, 128)
BUDGET = 2048
"""Tokens chosen besides the reserved pages, whatever the page size."""
DECODE_SHAPES = ("16x64k", "1x64k", "64x64k", "16x8k", "1x8k", "64x8k")
DECODE_PAGES = (64, 16, 1)
QUICK_DECODE = ("16x64k",)


@dataclass(frozen=True)
class PrefillShape:
    """A batch of requests with cached context and new tokens.

    Args:
        context, new: cached and new tokens of each request.
        heads: query heads.
        page: tokens a page.
        workspace: rows of the workspace that context is gathered into.
        sizes: of the model.
    """

    context: tuple[int, ...]
    new: tuple[int, ...]
    heads: int
    page: int = 16
    workspace: int = WORKSPACE_ROWS
    sizes: Sizes = DEEPSEEK

    @property
    def label(self) -> str:
        """Contexts and new tokens."""
        if len(self.context) == 1:
            return f"{self.context[0]:,} + {self.new[0]:,}"
        counts = [(n, len(list(group))) for n, group in itertools.groupby(self.context)]
        told = " and ".join(f"{count} x {n:,}" for n, count in counts)
        return f"{told}, + {self.new[0]:,} each" if len(set(self.new)) == 1 else f"{told}, + {sum(self.new):,}"

    @property
    def pages(self) -> tuple[int, ...]:
        """Pages of each request, its new tokens' included."""
        return tuple(-(-(c + n) // self.page) for c, n in zip(self.context, self.new, strict=True))

    @property
    def pairs(self) -> tuple[int, int]:
        """(query, key) pairs: of new tokens with context, and of new tokens with themselves and earlier new ones."""
        outer = sum(c * n for c, n in zip(self.context, self.new, strict=True))
        return outer, sum(n * (n + 1) // 2 for n in self.new)


def parse_prefill(text: str) -> tuple[int, int]:
    """Context and new tokens of ``60000+4096`` or ``32k+512``.

    Raises:
        BenchError: it is neither.
    """
    parts = text.strip().lower().split("+")
    try:
        context, new = (int(p.removesuffix("k")) * (1024 if p.endswith("k") else 1) for p in parts)
    except ValueError:
        raise BenchError(f"--prefill {text}: expected CONTEXT+NEW such as 60000+4096 or 32k+512") from None
    if context < 1 or new < 1:
        raise BenchError(f"--prefill {text}: expected at least one token of context and one new one")
    return context, new


def prefill_shapes(asked: Sequence[str], heads: Sequence[int], page: int) -> list[PrefillShape]:
    """The asked shapes for each number of heads; with none asked the whole sweep, the goal's shape first."""
    pairs = [parse_prefill(a) for a in asked] or list(itertools.product(PREFILL_CONTEXTS, PREFILL_NEW))
    return [PrefillShape((c,), (n,), h, page) for c, n in pairs for h in reversed(heads)]


def schedule_shapes(heads: Sequence[int], page: int, workspaces: Sequence[int]) -> list[PrefillShape]:
    """One context of 60,000 tokens and 31 of 16, 16 new tokens each, for each workspace."""
    context, new = (60_000, *(16,) * 31), (16,) * 32
    return [PrefillShape(context, new, h, page, w) for w in workspaces for h in reversed(heads)]


@dataclass(frozen=True)
class MlaNumbers(Numbers):
    """The numbers of a model with latents and of the budget; ``group_size`` is the number of query heads."""

    group_size: int = 128
    num_kv_heads: int = 1
    head_dim: int = DEEPSEEK.latent
    page_size: int = 64
    top_k: int = BUDGET // 64
    kv_lora_rank: int = DEEPSEEK.rank
    scale: float = DEEPSEEK.scale


@dataclass(frozen=True)
class MlaWorkload(Workload):
    """A decode batch over latents."""

    numbers: MlaNumbers

    @property
    def label(self) -> str:
        """Batch x context, heads and page."""
        n, batch = self.numbers, re.split(", (?:group|kv heads) ", super().label)[0]
        return f"{batch}, {n.group_size} heads, page {n.page_size}"


def decode_workloads(
    shapes: Sequence[str], heads: Sequence[int], pages: Sequence[int], budget: int = BUDGET, **more: int
) -> list[MlaWorkload]:
    """The shapes for each number of heads and page size, the most heads first; `more` are other numbers."""
    made = []
    for shape, page, count in itertools.product(shapes, pages, reversed(heads)):
        lengths = parse_shape(shape)
        numbers = MlaNumbers(group_size=count, page_size=page, top_k=max(1, budget // page), **more)
        made.append(MlaWorkload(canonical(lengths), lengths, numbers, budget == BUDGET and not more))
    return list(dict.fromkeys(made))


def mla_flows(asked: Sequence[str] = ()) -> tuple[FlowChoice, ...]:
    """The asked flows, or all over latents.

    Raises:
        BenchError: one is not over latents.
    """
    known = flowlib.list_flows(mla=True)
    wrong = [name for name in asked if name not in known]
    if wrong:
        raise BenchError(f"--flow {wrong[0]}: expected one of {', '.join(known)}")
    return tuple(FlowChoice(name, {}) for name in asked or known)
