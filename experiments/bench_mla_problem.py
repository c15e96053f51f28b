"""Inputs of latent prefill at full size, and what its sampled rows must be in float64.

Latents, queries and the up-projection are random normal numbers, as large as after a model's norms; pages are drawn at
random. Several caches hold other contexts and the same new tokens, so that calls in turn find none of them in the L2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from bench_mla_shapes import PrefillShape
from mla_cases import offsets


@dataclass(frozen=True, eq=False)
class PrefillProblem:
    """Tensors of a shape, bf16 unless said otherwise; T new tokens, H heads.

    Attributes:
        shape: the sizes.
        q: ``[T, H, nope + rope]``.
        latent: ``[T, rank + rope]`` of the new tokens.
        caches: ``[copies, pages, page, rank + rope]``: context, and the new tokens after it.
        block_table: int32 ``[n, W]``.
        slots: int64, for each request its tokens' places in a cache, context first.
        weight: ``[rank, H * (nope + dv)]``, the up-projection.
        query_start_loc: ``n + 1`` offsets.
    """

    shape: PrefillShape
    q: torch.Tensor
    latent: torch.Tensor
    caches: torch.Tensor
    block_table: torch.Tensor
    slots: tuple[torch.Tensor, ...]
    weight: torch.Tensor
    query_start_loc: tuple[int, ...]

    @property
    def scale(self) -> float:
        """Factor of q . k."""
        return self.shape.sizes.scale

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.q.device

    @property
    def absorbing(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights by head, contiguous: ``[H, nope, rank]`` takes queries to latents, ``[H, rank, dv]`` back."""
        sizes = self.shape.sizes
        by_head = self.weight.view(sizes.rank, self.shape.heads, sizes.nope + sizes.dv)
        return (
            by_head[..., : sizes.nope].permute(1, 2, 0).contiguous(),
            by_head[..., sizes.nope :].transpose(0, 1).contiguous(),
        )


def prefill_problem(shape: PrefillShape, device: str, copies: int = 1, seed: int = 0) -> PrefillProblem:
    """Random inputs; slots that no token has are NaN."""
    sizes, total = shape.sizes, sum(shape.pages)
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.bfloat16, device=device).normal_(generator=generator)

    q = normal(sum(shape.new), shape.heads, sizes.key)
    weight = normal(sizes.rank, shape.heads * (sizes.nope + sizes.dv)) * sizes.rank**-0.5
    latent = normal(len(q), sizes.latent)
    own = torch.randperm(total, generator=torch.Generator().manual_seed(seed)).split(list(shape.pages))
    table = torch.zeros(len(own), max(shape.pages), dtype=torch.int32)
    slots = []
    for row, pages, c, n in zip(table, own, shape.context, shape.new, strict=True):
        row[: len(pages)] = pages
        slots.append((pages[:, None] * shape.page + torch.arange(shape.page)).flatten()[: c + n].to(device))
    caches = torch.full((copies, total, shape.page, sizes.latent), torch.nan, dtype=torch.bfloat16, device=device)
    flat = caches.flatten(1, 2)
    for place, c, new in zip(slots, shape.context, latent.split(list(shape.new)), strict=True):
        for cache in flat:
            cache[place[:c]] = normal(c, sizes.latent)
            cache[place[c:]] = new
    return PrefillProblem(
        shape, q, latent, caches, table.to(device), tuple(slots), weight, tuple(offsets(shape.new))
    )  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """One head of one new token.

    Attributes:
        request, token, head: which; `row` is its place in the outputs.
        o, lse: exact, float64 ``[dv]`` and scalar.
        materialised, absorbed: o with what any implementation of either form rounds to bf16 rounded so.
        lse_tolerance: how far keys rounded to bf16 can move lse.
    """

    request: int
    token: int
    head: int
    row: int
    o: torch.Tensor
    lse: float
    materialised: torch.Tensor
    absorbed: torch.Tensor
    lse_tolerance: float


def samples(problem: PrefillProblem, cache: torch.Tensor) -> list[Sample]:
    """Exact attention of some rows: first and last token of the first, longest and last request, first and last head.

    Args:
        problem: the inputs.
        cache: ``[pages, page, rank + rope]``, one of the caches.
    """
    shape = problem.shape
    longest = shape.context.index(max(shape.context))
    found = []
    for request in dict.fromkeys((0, longest, len(shape.context) - 1)):
        if not shape.new[request]:
            continue
        for token in dict.fromkeys((0, shape.new[request] - 1)):
            for head in dict.fromkeys((0, shape.heads - 1)):
                found.append(_sample(problem, cache, request, token, head))
    return found


def _sample(problem: PrefillProblem, cache: torch.Tensor, request: int, token: int, head: int) -> Sample:
    shape, sizes = problem.shape, problem.shape.sizes
    seen = problem.slots[request][: shape.context[request] + token + 1]
    rows = cache.flatten(0, 1)[seen].double()
    width, row = sizes.nope + sizes.dv, problem.query_start_loc[request] + token
    weight = problem.weight[:, head * width : (head + 1) * width].double()
    q, both = problem.q[row, head].double(), rows[:, : sizes.rank] @ weight
    rope = rows[:, sizes.rank :]
    k, v = torch.cat((both[:, : sizes.nope], rope), 1), both[:, sizes.nope :]
    scores = k @ q * problem.scale
    weights = scores.softmax(0)
    low_k, low_v = rounded(torch.cat((both[:, : sizes.nope], rope), 1)), rounded(v)
    materialised = rounded(weighted(low_k @ q * problem.scale) @ low_v)
    absorbed_q = torch.cat((rounded(weight[:, : sizes.nope] @ q[: sizes.nope]), q[sizes.nope :]))
    content = rounded(weighted(rows @ absorbed_q * problem.scale) @ rows[:, : sizes.rank])
    absorbed = rounded(content @ weight[:, sizes.nope :])
    moved = problem.scale * (k.abs() @ q.abs()) * (torch.finfo(torch.bfloat16).eps / 2 + 2.0**-24 * sizes.key)
    return Sample(
        request, token, head, row, weights @ v, float(scores.logsumexp(0)), materialised, absorbed,
        float(weights @ moved) + 1e-5,
    )  # fmt: skip


def rounded(values: torch.Tensor) -> torch.Tensor:
    """float64 values of bf16."""
    return values.to(torch.bfloat16).double()


def weighted(scores: torch.Tensor) -> torch.Tensor:
    """Weights as a kernel has them: rounded to bf16 before the sum divides."""
    weights = (scores - scores.max()).exp()
    return rounded(weights) / weights.sum()
