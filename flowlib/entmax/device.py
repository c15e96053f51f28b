"""Decoding over a :class:`flowlib.PagedKVCache` by Triton kernels: the entmax flows over a view of the cache.

Rows that are decoded exactly are told apart on the device; nothing waits for it, except the check of a tensor `alpha`
that lies there. A step after the first of its sizes allocates next to nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from flowlib.algorithms.entmax import EntmaxGaussianAttention, EntmaxTopKAttention
from flowlib.core.attention import Entmax, Normaliser, Softmax
from flowlib.core.errors import FormatError, OptionError
from flowlib.core.spec import Spec
from flowlib.entmax.attention import Attended
from flowlib.entmax.cache import PagedKVCache
from flowlib.entmax.selection import Selection
from flowlib.runtime.api import profile
from flowlib.runtime.batch import Batch
from flowlib.runtime.entmax import unestimated
from flowlib.runtime.plan import Plan, StepOutput
from flowlib.runtime.pool import KVStore

if TYPE_CHECKING:
    from flowlib.entmax.decode import GaussianOptions, Step

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_step(what: str, step: Step, *, one_alpha: bool) -> None:
    """What kernels can't do.

    Raises:
        FormatError: a dtype. OptionError: different alphas, or 1 among them. BackendError: Triton can't run here.
    """
    if step.q.dtype is not step.cache.kv.dtype or step.q.dtype not in DTYPES:
        raise FormatError(
            f"{what}: q is {step.q.dtype} and the cache {step.cache.kv.dtype}, expected both float32, bfloat16 or "
            "float16 where impl is 'triton'"
        )
    if step.same_alpha is None and (one_alpha or bool((step.alphas == 1.0).any())):
        expected = "one for all heads" if one_alpha else "no 1 among others"
        raise OptionError(f"{what}: alpha is {step.alphas.tolist()}, expected {expected} where impl is 'triton'")
    _plan(EntmaxTopKAttention, (), _spec(step), None).check_impl("triton", step.q.device)


def topk(step: Step, topk_pages: int, least: int, out: torch.Tensor) -> StepOutput:
    """:func:`flowlib.entmax.topk_decode` of all rows into `out`; those under `least` tokens exactly."""
    alpha = step.same_alpha
    soft = alpha == 1.0
    options = {"alpha": 1.5 if soft or alpha is None else alpha, "topk_pages": topk_pages, "min_context": least}
    return _run(step, EntmaxTopKAttention, options, out, Softmax() if soft else None, alpha is None)


def gaussian(step: Step, given: GaussianOptions, least: int, out: torch.Tensor) -> StepOutput:
    """:func:`flowlib.entmax.gaussian_decode` of all rows into `out`; those under `least` tokens exactly."""
    options = {
        "alpha": step.same_alpha, "tau_mode": given.tau_mode, "niter": given.niter,
        "safety_margin_z": given.safety_margin_z, "max_quantile": given.max_quantile, "excess": given.excess,
        "min_context": least, "certify": "topk" in step.cache.stats,
        "stats_dtype": _stats_dtype(step.cache),
    }  # fmt: skip
    return _run(step, EntmaxGaussianAttention, options, out)


def _run(
    step: Step, flow: type, options: dict[str, Hashable], out: torch.Tensor,
    attention: Normaliser | None = None, by_head: bool = False,
) -> StepOutput:  # fmt: skip
    cache = step.cache
    plan = _plan(flow, tuple(options.items()), _spec(step), attention)
    key = (plan, cache.batch, by_head)
    if key not in cache.scratch:
        k, v = cache.kv.flatten(1, 2)
        store = KVStore(plan, k, v, _fields(plan, cache), cache.stats_scales)
        cache.scratch[key] = store, plan.allocate(cache.batch, cache.max_pages, step.q.device)
    store, scratch = cache.scratch[key]
    work = dict(scratch.workspace)
    if step.given_slopes is not None:
        work["alibi_slopes"] = step.given_slopes.to(torch.float32)
    if by_head:
        work["a_of_head"] = (step.alphas - 1.0).to(torch.float32).to(step.q.device, non_blocking=True)
    done = replace(scratch, o=out[:, :, 0], workspace=work)
    plan.launch(step.q, store, Batch(cache.block_table, cache.seq_lens), done)
    return done


def told(done: StepOutput, cache: PagedKVCache) -> tuple[Selection, Attended, torch.Tensor]:
    """What a step attended to, what it gave, and the certificates, in tensors that the next step leaves alone."""
    selection, certified = _chosen(done, cache)
    attended = _attended(done, cache)
    copies = [x.clone() for x in (*selection, attended.tau, attended.mass, certified)]
    return Selection(*copies[:3]), Attended(done.o, *copies[3:5]), copies[5]


def _spec(step: Step) -> Spec:
    """The sizes of a step; what its slopes are is told to the kernels alone, that there are some to the compiler."""
    kv, heads = step.cache.kv, step.q.shape[1]
    return Spec(
        page_size=step.cache.page_size, head_dim=kv.shape[4], group_size=heads // kv.shape[3], num_kv_heads=kv.shape[3],
        kv_dtype=kv.dtype, top_k=0, bos=0, eos=1, max_pages=step.cache.max_pages, max_batch=step.cache.batch,
        alibi_slopes=(1.0,) * heads if step.given_slopes is not None else None,
        summary_dtype=None if step.cache.stats_scales is None else step.cache.stats_dtype,
    )  # fmt: skip


@functools.lru_cache(maxsize=64)
def _plan(flow: type, options: tuple[tuple[str, Hashable], ...], spec: Spec, attention: Normaliser | None) -> Plan:
    plan = profile(flow(**dict(options)), spec)
    return plan if attention is None else Plan(plan.program, plan.spec, attention)


def _stats_dtype(cache: PagedKVCache) -> torch.dtype | None:
    """The dtype the flow declares for means and deviations: none for float8, which is that of the spec's summaries."""
    return None if cache.stats_scales is not None else cache.stored_stats.k_mean.dtype  # type: ignore[union-attr]


def _fields(plan: Plan, cache: PagedKVCache) -> dict[str, torch.Tensor]:
    stats = cache.stored_stats._asdict()
    return {name: stats[name][:, :, None] for name in plan.fields}


def _attended(done: StepOutput, cache: PagedKVCache) -> Attended:
    if isinstance(done.plan.attention, Entmax):
        return Attended(done.o, done.tau, done.mass)  # type: ignore[arg-type]
    occupied = (cache.seq_lens > 0)[:, None].expand(done.o.shape[:2])
    return Attended(done.o, done.lse, occupied.to(torch.float32))  # type: ignore[arg-type]


def _chosen(done: StepOutput, cache: PagedKVCache) -> tuple[Selection, torch.Tensor]:
    """The selection, and which heads are certainly exact: softmax where all pages are selected."""
    size, seq_lens = cache.page_size, cache.seq_lens.to(torch.int64)[:, None]
    tail = torch.div(seq_lens - 1, size, rounding_mode="floor")
    tokens = torch.where(done.lengths > 0, (done.lengths - 1) * size + seq_lens - tail * size, 0)
    certified = done.certified
    if certified is None:  # without bounds nothing is known of rows that are not decoded exactly
        certified = unestimated(done.plan, cache.seq_lens)[:, None].expand(done.lengths.shape)
    if not isinstance(done.plan.attention, Entmax):
        certified = done.lengths == tail + 1
    certified = cache.vouched(certified, done.lengths, cache.seq_lens)
    return Selection(done.pages, done.lengths, tokens.to(torch.int32)), certified
