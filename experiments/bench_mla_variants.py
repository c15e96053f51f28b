"""Ways to prefill over a cached context of latents: flowlib's chunked loop, and absorbed attention by flowlib's kernel.

The chunked form up-projects latents into keys and values of all heads and attends with 192 and 128 channels; the
absorbed form takes queries to the latents and attends with 576 and 512. Both begin with q and the latents of the new
tokens, and end with o of all heads: the products before and behind the attention are part of their time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from bench_mla_counts import Work, absorbed_work, chunked_work
from bench_mla_problem import PrefillProblem

from flowlib import mla

Call = Callable[[torch.Tensor], object]
Output = tuple[torch.Tensor, torch.Tensor | None]


class Variant(Protocol):
    """One way to prefill.

    Attributes:
        name: for tables.
        absorbed: whether it attends to latents.
        own: whether it is flowlib's, so that a wrong answer makes the gate red.
    """

    name: str
    absorbed: bool
    own: bool

    def run(self, cache: torch.Tensor) -> Output:
        """o ``[T, H, dv]`` and, where it has one, lse ``[T, H]``, over a cache ``[pages, page, rank + rope]``."""
        ...

    def stages(self) -> dict[str, Call]:
        """Its stages alone, by name, ready to be timed; those in brackets are part of the one before."""
        ...

    def work(self) -> dict[str, Work]:
        """What its stages must move and compute."""
        ...


class Chunked:
    """flowlib's loop over chunks.

    Args:
        problem: the inputs.
        attention: ``"triton"`` or ``"flashinfer"``.
        schedule: ``"packed"`` or ``"even"``.
    """

    absorbed, own = False, True

    def __init__(self, problem: PrefillProblem, attention: str, schedule: str = "packed") -> None:
        shape = problem.shape
        self.problem, self.attention = problem, attention
        self.name = f"chunked, {attention}" + (f", {schedule}" if schedule != "packed" else "")
        self.context = mla.build_chunked_context(
            shape.context, problem.query_start_loc, shape.workspace, shape.page, schedule, problem.device
        )
        self.up_project = mla.up_projection(problem.weight, shape.heads, shape.sizes.dv)
        rows = max(self.context.max_token_num_over_chunk, 1)
        self.workspace = torch.full((rows, shape.sizes.latent), torch.nan, dtype=torch.bfloat16, device=problem.device)
        size = (len(problem.q), shape.heads, shape.sizes.dv)
        self.out = torch.full(size, torch.nan, dtype=torch.bfloat16, device=problem.device)

    def run(self, cache: torch.Tensor) -> Output:
        """As for :class:`Variant`."""
        p = self.problem
        k, v = self.up_project(p.latent)
        done = mla.chunked_prefill(
            p.q, k, v, cache, p.block_table, self.context, self.up_project, scale=p.scale, workspace=self.workspace,
            out=self.out, impl="triton", attention=self.attention,
        )  # fmt: skip
        return done.o, done.lse

    def stages(self) -> dict[str, Call]:
        """As for :class:`Variant`."""
        p, rank = self.problem, self.problem.shape.sizes.rank
        chunks = [(i, c) for i, c in enumerate(self.context.chunks) if c.rows[0] < c.rows[1]]
        own_k, own_v = self.up_project(p.latent)
        for i, chunk in chunks:
            self._gather(p.caches[0], i, chunk.tokens)
        k, v = self.up_project(self.workspace)
        total, partial = (torch.empty(self.out.shape, device=p.device) for _ in range(2))
        lse, partial_lse = (torch.empty(total.shape[:2], device=p.device) for _ in range(2))

        def attend(c: mla.Chunk) -> None:
            first, end = c.rows
            self._attend(p.q[first:end], k[: c.tokens], v[: c.tokens], c.batch, False, partial[first:end],
                         partial_lse[first:end])  # fmt: skip

        def merge(c: mla.Chunk) -> None:
            rows = slice(*c.rows)
            mla.merge_attn_states(
                partial[rows], partial_lse[rows], total[rows], lse[rows], out=total[rows], out_lse=lse[rows],
                impl="triton",
            )  # fmt: skip

        calls: dict[str, Call] = {
            "project new": lambda cache: self.up_project(p.latent),
            "attend new": lambda cache: self._attend(p.q, own_k, own_v, self.context.queries, True, total, lse),
            "gather": lambda cache: [self._gather(cache, i, c.tokens) for i, c in chunks],
            "project": lambda cache: [self.up_project(self.workspace[: c.tokens]) for _, c in chunks],
            "(product)": lambda cache: [torch.mm(self.workspace[: c.tokens, :rank], p.weight) for _, c in chunks],
            "attend": lambda cache: [attend(c) for _, c in chunks],
            "merge": lambda cache: [merge(c) for _, c in chunks],
        }
        for name in ("attend new", "attend"):  # what merging and later calls read
            calls[name](p.caches[0])
        return calls

    def work(self) -> dict[str, Work]:
        """As for :class:`Variant`."""
        return chunked_work(self.problem.shape)

    def _gather(self, cache: torch.Tensor, i: int, tokens: int) -> None:
        context = self.context
        mla.gather_latent(
            cache, self.problem.block_table, context.cu_seq_lens[i], context.token_to_seq[i], tokens, self.workspace,
            context.starts[i], "triton",
        )  # fmt: skip

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: mla.RaggedBatch, causal: bool,
        out: torch.Tensor, lse: torch.Tensor,
    ) -> None:  # fmt: skip
        mla.varlen_attention(
            q, k, v, batch, scale=self.problem.scale, causal=causal, out=out, lse=lse, attention=self.attention,
            impl="triton",
        )  # fmt: skip


class Absorbed:
    """Attention over the latents themselves; subclasses say by what kernel.

    Args:
        problem: the inputs.
    """

    absorbed, own = True, False
    name = "absorbed"

    def __init__(self, problem: PrefillProblem) -> None:
        shape, device = problem.shape, problem.device
        self.problem, (self.into, self.back) = problem, problem.absorbing
        tokens, heads, sizes = len(problem.q), shape.heads, shape.sizes
        self.queries = torch.full((tokens, heads, sizes.latent), torch.nan, dtype=torch.bfloat16, device=device)
        self.content = torch.full((tokens, heads, sizes.rank), torch.nan, dtype=torch.bfloat16, device=device)
        self.starts = torch.tensor(problem.query_start_loc, dtype=torch.int32, device=device)
        self.lengths = torch.tensor(
            [c + n for c, n in zip(shape.context, shape.new, strict=True)], dtype=torch.int32, device=device
        )

    def run(self, cache: torch.Tensor) -> Output:
        """As for :class:`Variant`."""
        self.absorb()
        lse = self.attend(cache)
        return self.restore(), lse

    def stages(self) -> dict[str, Call]:
        """As for :class:`Variant`."""
        self.run(self.problem.caches[0])
        return {
            "absorb": lambda cache: self.absorb(), "attend": self.attend, "restore": lambda cache: self.restore(),
        }  # fmt: skip

    def work(self) -> dict[str, Work]:
        """As for :class:`Variant`."""
        return absorbed_work(self.problem.shape)

    def absorb(self) -> None:
        """Queries for latents."""
        sizes, q = self.problem.shape.sizes, self.problem.q
        torch.bmm(
            q[..., : sizes.nope].transpose(0, 1), self.into, out=self.queries[..., : sizes.rank].transpose(0, 1)
        )
        self.queries[..., sizes.rank :] = q[..., sizes.nope :]

    def attend(self, cache: torch.Tensor) -> torch.Tensor | None:
        """Writes the content ``[T, H, rank]``; returns lse ``[T, H]``, if the kernel has one."""
        raise NotImplementedError

    def restore(self) -> torch.Tensor:
        """o of all heads."""
        return torch.bmm(self.content.transpose(0, 1), self.back).transpose(0, 1)


class AbsorbedDecode(Absorbed):
    """flowlib's decode kernel, every new token a row of its own that reads all its latents."""

    name, own = "absorbed, flowlib decode kernel", True

    def __init__(self, problem: PrefillProblem) -> None:
        super().__init__(problem)
        from flowlib.kernels.attend_mla import num_splits

        shape, device = problem.shape, problem.device
        new = torch.tensor(shape.new)
        owner = torch.repeat_interleave(torch.arange(len(new)), new).to(device)
        seen = [torch.arange(c, c + n) + 1 for c, n in zip(shape.context, shape.new, strict=True)]
        self.seen = torch.cat(seen).to(device, torch.int32)
        alone = len(new) == 1
        self.table = problem.block_table.expand(len(owner), -1) if alone else problem.block_table[owner]
        self.splits = num_splits(self.table.shape[1], shape.page, len(owner), shape.heads, 2)
        self.lse = torch.full(self.content.shape[:2], torch.nan, device=device)
        self.partial: tuple[torch.Tensor, torch.Tensor] | tuple[None, None] = (None, None)
        if self.splits > 1:
            partial = torch.full((*self.lse.shape, self.splits), torch.nan, device=device)
            self.partial = partial[..., None].expand(*partial.shape, shape.sizes.rank).contiguous(), partial

    def attend(self, cache: torch.Tensor) -> torch.Tensor | None:
        """As for :class:`Absorbed`."""
        from flowlib.kernels.attend_mla import launch_attend_mla
        from flowlib.runtime.execute import has_pdl

        p, latent = self.problem, cache.flatten(0, 1)[:, None]
        launch_attend_mla(
            self.queries, latent, latent[..., : p.shape.sizes.rank], self.table, self.seen, None, None, self.content,
            self.lse, *self.partial, num_kv_heads=1, group_size=p.shape.heads, lanes=1,
            page_size=p.shape.page, scale=p.scale, k_scale=1.0, v_scale=1.0, num_splits=self.splits, every=True,
            pdl=has_pdl(p.device),
        )  # fmt: skip
        return self.lse
