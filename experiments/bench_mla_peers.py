"""Others over the same latents: absorbed attention of FlashInfer and FlashAttention 3, SGLang's chunked prefix loop.

They are called as SGLang 0.5.16 calls them. Plans are made once a batch and not timed.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from typing import Any

import torch
from bench_mla_counts import Work, chunked_work, one_shot_work
from bench_mla_problem import PrefillProblem
from bench_mla_shapes import SGLANG_CAPACITY
from bench_mla_variants import Absorbed, Call, Output
from mla_cases import offsets

_WORKSPACE_BYTES = 512 << 20
_RAGGED_BYTES = 128 << 20
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def is_compiled(ragged: bool, latent: int = 512, rope: int = 64, device: str | torch.device = "cuda") -> bool:
    """Whether FlashInfer's library for latents, or for ragged keys of 192 and values of 128 channels, lies ready."""
    modules: Any = importlib.import_module("flashinfer.jit.attention")
    backend = "fa3" if torch.cuda.get_device_capability(device)[0] == 9 else "fa2"
    b, i = torch.bfloat16, torch.int32
    if ragged:
        made = modules.gen_batch_prefill_module(backend, b, b, b, i, 192, 128, 0, False, False, False)
    else:
        made = modules.gen_batch_mla_module(backend, b, b, b, i, latent, rope, False)
    return made.is_compiled


def check_compiled(allowed: bool, ragged: bool) -> None:
    """Raises RuntimeError where FlashInfer would compile and may not."""
    if not allowed and not is_compiled(ragged):
        raise RuntimeError("its kernel for these numbers is not compiled (--compile-peers takes minutes)")


def latent_wrapper(
    workspace: torch.Tensor, starts: list[int], pages: list[torch.Tensor], lengths: list[int], heads: int,
    sizes: tuple[int, int], page: int, causal: bool, scale: float,
) -> Any:  # fmt: skip
    """FlashInfer's attention over latents, planned.

    Args:
        workspace: uint8.
        starts: first query of each request, and the end.
        pages: int32, the pages of each request.
        lengths: tokens of each request.
        heads: query heads; `sizes`: content and rope channels; `page`: tokens a page.
        causal: whether queries are the last tokens; `scale`: of q . k.
    """
    library: Any = importlib.import_module("flashinfer")
    device = workspace.device
    wrapper = library.BatchMLAPagedAttentionWrapper(workspace, backend="auto")
    index = [torch.tensor(x, dtype=torch.int32, device=device) for x in (
        starts, offsets([len(p) for p in pages]), lengths)]  # fmt: skip
    wrapper.plan(
        index[0], index[1], torch.cat(pages), index[2], heads, *sizes, page, causal, scale, torch.bfloat16,
        torch.bfloat16,
    )  # fmt: skip
    torch.cuda.synchronize()  # plan copies without waiting
    return wrapper


class AbsorbedFlashInfer(Absorbed):
    """FlashInfer's ``BatchMLAPagedAttentionWrapper``."""

    name = "absorbed, FlashInfer"

    def __init__(self, problem: PrefillProblem, compile_missing: bool) -> None:
        super().__init__(problem)
        check_compiled(compile_missing, ragged=False)
        shape, sizes = problem.shape, problem.shape.sizes
        pages = [row[:n] for row, n in zip(problem.block_table, shape.pages, strict=True)]
        self.workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=problem.device)
        self.wrapper = latent_wrapper(
            self.workspace, list(problem.query_start_loc), pages, self.lengths.tolist(), shape.heads,
            (sizes.rank, sizes.rope), shape.page, True, problem.scale,
        )  # fmt: skip

    def attend(self, cache: torch.Tensor) -> torch.Tensor | None:
        """As for :class:`Absorbed`."""
        rank = self.problem.shape.sizes.rank
        q = self.queries
        self.wrapper.run(q[..., :rank], q[..., rank:], cache[..., :rank], cache[..., rank:], out=self.content)
        return None


class AbsorbedFA3(Absorbed):
    """FlashAttention 3 of sglang-kernel: rope channels as keys, content as values with queries of their own."""

    name = "absorbed, FA3"

    def __init__(self, problem: PrefillProblem) -> None:
        super().__init__(problem)
        self.library: Any = importlib.import_module("sgl_kernel.flash_attn").flash_attn_with_kvcache

    def attend(self, cache: torch.Tensor) -> torch.Tensor | None:
        """As for :class:`Absorbed`."""
        p, rank = self.problem, self.problem.shape.sizes.rank
        self.content = fa3_latent(
            self.library, self.queries, cache[:, :, None], rank, p.block_table, self.lengths, self.starts,
            max(p.shape.new), p.scale,
        )  # fmt: skip
        return None


def fa3_latent(
    library: Any, q: torch.Tensor, cache: torch.Tensor, rank: int, table: torch.Tensor, lengths: torch.Tensor,
    starts: torch.Tensor, longest: int, scale: float,
) -> torch.Tensor:  # fmt: skip
    """o ``[T, H, rank]`` of queries ``[T, H, rank + rope]`` over latents ``[pages, page, 1, rank + rope]``."""
    return library(
        q=q[..., rank:], qv=q[..., :rank], k_cache=cache[..., rank:], v_cache=cache[..., :rank], page_table=table,
        cache_seqlens=lengths, cu_seqlens_q=starts, max_seqlen_q=longest, softmax_scale=scale, causal=True,
        window_size=(-1, -1), softcap=0.0, num_splits=0,
    )  # fmt: skip


class SGLangPrefix:
    """SGLang's prefill with keys and values of all heads, by calls of an installed attention.

    In chunks: the new tokens first, then an even share of the context of every request at a time; or, as SGLang does
    where all tokens fit in one chunk, context and new tokens in one attention. FlashInfer's log-sum-exp is converted to
    the natural one, which 0.5.16 does not do.

    Args:
        problem: the inputs.
        library: ``"FlashInfer"`` or ``"FA3"``.
        one_shot: not in chunks.
        compile_missing: let FlashInfer compile.
    """

    absorbed, own = False, False

    def __init__(self, problem: PrefillProblem, library: str, one_shot: bool, compile_missing: bool) -> None:
        shape = problem.shape
        self.problem, self.one_shot = problem, one_shot
        self.name = f"SGLang {'one shot' if one_shot else 'chunks'}, {library}"
        tokens = sum(shape.context) + sum(shape.new)
        if one_shot and tokens > SGLANG_CAPACITY:
            raise RuntimeError(f"SGLang takes chunks at {tokens:,} tokens, more than {SGLANG_CAPACITY:,}")
        if library == "FlashInfer":
            check_compiled(compile_missing, ragged=True)
        make = functools.partial(_fa3, problem)
        if library == "FlashInfer":
            make = functools.partial(_flashinfer, problem, problem.q.new_empty(_RAGGED_BYTES, dtype=torch.uint8))
        self.spans = self._spans()
        self.indices = [
            torch.cat([own[a:b] for own, (a, b) in zip(problem.slots, span, strict=True)]) for span in self.spans
        ]
        self.causal = None if one_shot else make(list(shape.new), True)
        self.chunks = [make([b - a for a, b in span], one_shot) for span in self.spans]
        self.merge = None if one_shot else importlib.import_module("sgl_kernel").merge_state_v2

    def _spans(self) -> list[list[tuple[int, int]]]:
        """Of each chunk, first token and end of each request."""
        shape = self.problem.shape
        if self.one_shot:
            return [[(0, c + n) for c, n in zip(shape.context, shape.new, strict=True)]]
        step = SGLANG_CAPACITY // len(shape.context)
        firsts = range(0, max(shape.context), step)
        return [[(min(first, c), min(first + step, c)) for c in shape.context] for first in firsts]

    def run(self, cache: torch.Tensor) -> Output:
        """As for :class:`bench_mla_variants.Variant`."""
        p = self.problem
        if self.causal is None:
            return self.chunks[0](p.q, *self.project(self.fetch(cache, 0)))
        o, lse = self.causal(p.q, *self.project(p.latent))
        for i, attend in enumerate(self.chunks):
            part, part_lse = attend(p.q, *self.project(self.fetch(cache, i)))
            o, lse = self.merged(part, part_lse, o, lse)
        return o, lse

    def fetch(self, cache: torch.Tensor, i: int) -> torch.Tensor:
        """Latents of a chunk."""
        return cache.flatten(0, 1).index_select(0, self.indices[i])

    def project(self, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all heads."""
        sizes, heads = self.problem.shape.sizes, self.problem.shape.heads
        both = (latent[:, : sizes.rank] @ self.problem.weight).view(len(latent), heads, sizes.nope + sizes.dv)
        k = both.new_empty(len(latent), heads, sizes.key)
        k[..., : sizes.nope] = both[..., : sizes.nope]
        k[..., sizes.nope :] = latent[:, None, sizes.rank :]
        return k, both[..., sizes.nope :]

    def merged(self, *states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Two partial attentions made one."""
        if self.merge is None:
            raise RuntimeError("one attention has nothing to merge")
        o, lse = torch.empty_like(states[0]), torch.empty_like(states[1])
        self.merge(*states, o, lse)
        return o, lse

    def stages(self) -> dict[str, Call]:
        """As for :class:`bench_mla_variants.Variant`."""
        p, count = self.problem, range(len(self.chunks))
        latents = [self.fetch(p.caches[0], i) for i in count]
        longest = max(latents, key=len)
        k, v = self.project(longest)
        calls: dict[str, Call] = {
            "gather": lambda cache: [self.fetch(cache, i) for i in count],
            "project": lambda cache: [self.project(x) for x in latents],
            "attend": lambda cache: [self.chunks[i](p.q, k[: len(latents[i])], v[: len(latents[i])]) for i in count],
        }
        if self.causal is not None:
            own, (own_k, own_v) = self.causal, self.project(p.latent)
            state, part = own(p.q, own_k, own_v), self.chunks[0](p.q, k, v)
            calls |= {
                "project new": lambda cache: self.project(p.latent),
                "attend new": lambda cache: own(p.q, own_k, own_v),
                "merge": lambda cache: [self.merged(*part, *state) for _ in count],
            }
        return calls

    def work(self) -> dict[str, Work]:
        """As for :class:`bench_mla_variants.Variant`."""
        return (one_shot_work if self.one_shot else chunked_work)(self.problem.shape)


def _fa3(problem: PrefillProblem, keys: list[int], causal: bool) -> Attend:
    """FA3 over `keys` keys of each request."""
    library: Any = importlib.import_module("sgl_kernel.flash_attn").flash_attn_varlen_func
    starts, ends = (
        torch.tensor(x, dtype=torch.int32, device=problem.device) for x in (problem.query_start_loc, offsets(keys))
    )

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        o, lse, *_ = library(
            q=q, k=k, v=v, cu_seqlens_q=starts, cu_seqlens_k=ends, max_seqlen_q=max(problem.shape.new),
            max_seqlen_k=max(keys), softmax_scale=problem.scale, causal=causal, return_softmax_lse=True,
        )  # fmt: skip
        return o, lse.t().contiguous()

    return attend


def _flashinfer(problem: PrefillProblem, workspace: torch.Tensor, keys: list[int], causal: bool) -> Attend:
    """FlashInfer's ragged prefill over `keys` keys of each request."""
    library: Any = importlib.import_module("flashinfer")
    wrapper = library.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend="auto")
    shape, sizes = problem.shape, problem.shape.sizes
    starts, ends = (torch.tensor(x, dtype=torch.int32) for x in (problem.query_start_loc, offsets(keys)))
    wrapper.plan(
        starts, ends, num_qo_heads=shape.heads, num_kv_heads=shape.heads, head_dim_qk=sizes.key, head_dim_vo=sizes.dv,
        causal=causal, sm_scale=problem.scale, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
    )  # fmt: skip
    torch.cuda.synchronize()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        o, base_2 = wrapper.run(q, k, v, return_lse=True)
        return o, base_2 * math.log(2.0)

    return attend
