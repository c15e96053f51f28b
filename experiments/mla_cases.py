"""Data, cases and oracles of chunked latent prefill: deterministic, hostile wherever nothing may be read.

The numbers are those of DeepSeek-V2-Lite. The oracles are written from the formulas, with loops over requests, tokens
and heads; they know nothing of chunks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

GATE = 8e-3
"""Largest error of bf16 outputs of size 0.15 to 1.3: four times what an exact algorithm makes with bf16 partials."""


@dataclass(frozen=True)
class Sizes:
    """Of a model: a latent row is ``[rank | rope]``, a key ``[nope | rope]``, a value ``dv``."""

    rank: int = 512
    rope: int = 64
    nope: int = 128
    dv: int = 128
    scale: float = 192**-0.5 * (0.1 * 0.707 * math.log(40.0) + 1.0) ** 2

    @property
    def latent(self) -> int:
        """Values of a latent row."""
        return self.rank + self.rope

    @property
    def key(self) -> int:
        """Values of a key."""
        return self.nope + self.rope


DEEPSEEK = Sizes()
"""DeepSeek-V2-Lite; its scale has YaRN's factor, without it 0.0722."""
SMALL = Sizes(32, 0, 32, 32, 32**-0.5)
"""SGLang's unit tests of latent attention."""


def lcg(seed: int, *shape: int) -> torch.Tensor:
    """float64 in [-1, 1): ``s <- s * 1664525 + 1013904223 mod 2^32``, ``(s >> 8) / 2^24 * 2 - 1``."""
    count, mask = math.prod(shape), 2**32 - 1
    factor, step = 1664525, 1013904223
    states = np.array([(seed * factor + step) & mask], dtype=np.uint64)
    while len(states) < count:  # the states that follow are an affine function of those before them
        states = np.concatenate((states, (states * np.uint64(factor) + np.uint64(step)) & np.uint64(mask)))
        factor, step = factor * factor & mask, (factor * step + step) & mask
    values = (states[:count] >> np.uint64(8)).astype(np.float64) / 2**24 * 2 - 1
    return torch.from_numpy(values).view(shape)


@dataclass(frozen=True)
class Case:
    """A batch.

    Attributes:
        context, queries: cached and new tokens of each request.
        heads: H.
        workspace: rows.
        step, chunks: of the even grid: rows of a request in a chunk, and how many chunks; 0 where not given.
        page: tokens a page.
        sizes: of the model.
        dtype: what inputs are rounded to.
    """

    name: str
    context: tuple[int, ...]
    queries: tuple[int, ...]
    heads: int = 16
    workspace: int = 128
    step: int = 0
    chunks: int = 0
    page: int = 16
    sizes: Sizes = DEEPSEEK
    dtype: torch.dtype = torch.bfloat16

    @property
    def query_start_loc(self) -> list[int]:
        """First new token of each request, and the end."""
        return offsets(self.queries)

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        """float64 values of the case's dtype."""
        return values.to(self.dtype).double()


def offsets(lengths: Sequence[int]) -> list[int]:
    """0 and the running sums."""
    return [0, *np.cumsum(np.array(lengths, dtype=np.int64)).tolist()]


LOOP_CASES = (
    Case("single", (32,), (8,), 16, 256, 256, 1),
    Case("three", (96,), (8,), 16, 32, 32, 3),
    Case("edges", (64, 65, 63), (4, 4, 4), 16, 96, 32, 3),
    Case("no-ctx", (80, 0), (6, 6), 16, 64, 64, 2),
    Case("ragged", (160, 48, 96, 16), (3, 9, 1, 17), 16, 128, 32, 5),
    Case("128 heads", (80, 32), (4, 4), 128, 64, 32, 3),
)
"""With DeepSeek's sizes; the even grid of each is known."""

MORE_CASES = (
    Case("context-free first", (0, 0, 70), (3, 2, 5), 4, 64),
    Case("context-free middle", (64, 0, 48), (4, 6, 5), 4, 128),
    Case("context-free last", (33, 50, 0, 0), (2, 1, 4, 3), 4, 96),
    Case("no context", (0, 0), (5, 9), 4, 64),
    Case("query_len 0", (40, 24, 0, 31), (3, 0, 0, 2), 4, 64),
    Case("workspace of one page", (37, 0, 20), (2, 3, 1), 4, 16),
    Case("pages of 1", (19, 7), (2, 5), 4, 8, page=1),
    Case("pages of 64", (130, 64, 1), (2, 1, 4), 4, 256, page=64),
)
"""With context-free requests everywhere, no queries, the smallest workspace and other pages."""

SMALL_CASES = tuple(
    Case(f"{context}/{queries} page {page}", context, queries, 4, 64, page=page, sizes=SMALL, dtype=torch.float16)
    for page in (1, 16, 32)
    for context, queries in (
        ((2, 4), (3, 1)), ((0,), (16,)), ((0, 0, 0), (15, 16, 17)), ((16,), (2,)), ((8,), (8,)), ((15,), (2,)),
        ((0, 8, 16), (15, 8, 1)), ((31,), (2,)),
    )
)  # fmt: skip
"""SGLang's, with 4 heads in fp16; cached / new tokens."""


def backend_case(name: str, total: tuple[int, ...], queries: tuple[int, ...], heads: int) -> Case:
    """A batch of vLLM's matrix of backends, which counts the new tokens in `total`."""
    context = tuple(t - m for t, m in zip(total, queries, strict=True))
    return Case(name, context, queries, heads, 4096)


BACKEND_SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "small prefill": ((32, 40), (8, 8)),
    "mixed small": ((32, 40, 48, 56), (1, 1, 5, 5)),
    "medium prefill": ((256, 512, 1024, 2048), (16, 16, 16, 16)),
    "mixed medium": ((512, 1024, 2048, 512, 1024, 2048), (1, 1, 1, 7, 7, 7)),
    "large prefill": ((4096,) * 8, (32,) * 8),
    "single prefill": ((1024,), (64,)),
}
"""Tokens of each request, and the new ones among them."""


@dataclass(frozen=True, eq=False)
class Problem:
    """Tensors of a case on one device, in one dtype that holds the case's values.

    Attributes:
        q, k, v: of the new tokens, ``[T, H, 192]``, ``[T, H, 192]``, ``[T, H, 128]``.
        cache: ``[pages, page, 576]``, NaN wherever no context is.
        block_table: int32, reverse-interleaved; no page at all past a request's context.
        weight: float64 ``[512, H * 256]``.
        whole: float64 keys and values of all tokens of each request, on the CPU.
        truth, truth_lse: float64 on the CPU, one causal attention over everything.
    """

    case: Case
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cache: torch.Tensor
    block_table: torch.Tensor
    weight: torch.Tensor
    whole: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    truth: torch.Tensor
    truth_lse: torch.Tensor

    def up_project(self, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of latent rows, in their dtype."""
        k, v = projected(self.case, self.weight, latent)
        return k.to(latent.dtype), v.to(latent.dtype)

    def tolerance(self) -> torch.Tensor:
        """How far each output may be: weights and outputs are rounded to the case's dtype once, and twice that.

        Rounding the weights of Σ p·v to unit roundoff u moves it by at most u·Σ p·|v|, rounding the result by u·|o|.
        """
        absolute = [(k, v.abs()) for k, v in self.whole]
        q = self.q.cpu().double().split(list(self.case.queries))
        spread, _ = causal_attention(q, absolute, self.case.sizes.scale)
        return torch.finfo(self.case.dtype).eps * (spread + self.truth.abs()) + 1e-6

    def error(self, out: torch.Tensor) -> float:
        """Largest distance from the truth; inf where a NaN is."""
        worst = (out.detach().cpu().double() - self.truth).abs().max() if out.numel() else torch.zeros(())
        return float("inf") if bool(worst.isnan()) else float(worst)


def projected(case: Case, weight: torch.Tensor, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 keys ``[rows, H, 192]`` and values ``[rows, H, 128]``: products in float64, then rounded."""
    sizes = case.sizes
    both = case.rounded(latent[:, : sizes.rank].double() @ weight).view(len(latent), case.heads, sizes.nope + sizes.dv)
    rope = latent[:, None, sizes.rank :].double().expand(-1, case.heads, -1)
    return torch.cat((both[..., : sizes.nope], rope), -1), both[..., sizes.nope :]


def problem(case: Case, device: str = "cpu", dtype: torch.dtype | None = None) -> Problem:
    """Inputs and truth of a case; `dtype` may be wider than the case's."""
    sizes, page, n = case.sizes, case.page, len(case.context)
    lengths = [c + m for c, m in zip(case.context, case.queries, strict=True)]
    weight = lcg(909, sizes.rank, case.heads * (sizes.nope + sizes.dv)) / math.sqrt(sizes.rank)
    latents = [case.rounded(lcg(1000 + 17 * i, length, sizes.latent)) for i, length in enumerate(lengths)]
    width = -(-max(lengths, default=0) // page) + 1
    table = torch.full((n, width), 2**31 - 1, dtype=torch.int32)
    cache = torch.full((n * width, page, sizes.latent), math.nan, dtype=torch.float64)
    for i, context in enumerate(case.context):
        for p in range(-(-context // page)):
            table[i, p] = n * width - 1 - (p * n + i)
            rows = latents[i][p * page : min((p + 1) * page, context)]
            cache[int(table[i, p]), : len(rows)] = rows
    q = case.rounded(lcg(4242, sum(case.queries), case.heads, sizes.key))
    whole = tuple(projected(case, weight, rows) for rows in latents)
    truth, truth_lse = causal_attention(q.split(list(case.queries)), whole, sizes.scale)
    k, v = (torch.cat([pair[i][c:] for pair, c in zip(whole, case.context, strict=True)]) for i in (0, 1))
    q, k, v, cache = (x.to(device, dtype or case.dtype) for x in (q, k, v, cache))
    return Problem(case, q, k, v, cache, table.to(device), weight.to(device), whole, truth, truth_lse)


def causal_attention(
    queries: Sequence[torch.Tensor], keys_values: Sequence[tuple[torch.Tensor, torch.Tensor]], scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 outputs ``[T, H, Dv]`` and log-sum-exp ``[T, H]``: a request's last tokens see all before them."""
    outputs, sums = [], []
    for q, (k, v) in zip(queries, keys_values, strict=True):
        for j, row in enumerate(q):
            seen = len(k) - len(q) + j + 1
            scores = torch.einsum("hd,thd->ht", row, k[:seen]) * scale
            top = scores.max(1, keepdim=True).values
            weights = (scores - top).exp()
            outputs.append(torch.einsum("ht,thd->hd", weights, v[:seen]) / weights.sum(1, keepdim=True))
            sums.append(weights.sum(1).log() + top[:, 0])
    return torch.stack(outputs), torch.stack(sums)


def merged(
    prefix: torch.Tensor, prefix_lse: torch.Tensor, suffix: torch.Tensor, suffix_lse: torch.Tensor, limit: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 merge of ``[T, H, D]`` and ``[T, H]``: both sides hold sums over e^lse, so multiply, add, divide."""
    a, b = (torch.where(x == math.inf, -math.inf, x.double()) for x in (prefix_lse, suffix_lse))
    total = torch.logaddexp(a, b)
    o = torch.zeros(prefix.shape, dtype=torch.float64, device=prefix.device)
    for lse, part in ((a, prefix), (b, suffix)):
        share = (lse - total).exp()[..., None]
        o += torch.where(share > 0, part.double() * share, 0.0)
    nobody = (a == -math.inf) & (b == -math.inf)
    o[nobody] = prefix.double()[nobody]
    o[limit:], total[limit:] = suffix[limit:].double(), suffix_lse[limit:].double()
    return o, total


def gathered(
    cache: torch.Tensor, table: torch.Tensor, lens: Sequence[int], starts: Sequence[int]
) -> torch.Tensor:
    """Rows ``starts[b] .. starts[b] + lens[b]`` of every request, one after the other."""
    page = cache.shape[1]
    rows = [
        cache[int(table[b, p // page]), p % page]
        for b, (start, length) in enumerate(zip(starts, lens, strict=True))
        for p in range(start, start + length)
    ]
    return torch.stack(rows) if rows else cache.new_empty(0, cache.shape[2])
