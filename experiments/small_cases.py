"""One small case of each hand-written kernel, and of the generated ones of every flow, for tools that watch memory.

    compute-sanitizer --tool memcheck python experiments/small_cases.py
    compute-sanitizer --tool racecheck python experiments/small_cases.py --flow quest --flow block_sparse

Every registered flow writes a pool, updates its fields, and steps in Triton over rows of odd lengths whose pages are
scattered, a row of one token and an empty one among them: with fields updated beforehand, in the launch that scores,
and beside attention to a table of short rows. Further cases launch what these do not: rows wider than registers hold,
many tokens of entmax, long rows' moments, ops along the pages, a prefill in chunks. Results are compared with the
reference, so that a run says that the kernels ran; it runs on the CPU, since racecheck takes minutes for torch's sort.
"""

from __future__ import annotations

import math
import sys
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

import flowlib
from flowlib import mla
from flowlib.entmax import gaussian_decode, topk_decode
from flowlib.errors import FlowlibError, OptionError
from flowlib.kernels.gaussian import launch_gaussian_tau, parts_of
from flowlib.kernels.pages import launch_conv1d, launch_normalize
from flowlib.kernels.planning import launch_page_table
from flowlib.kernels.select import launch_select, scratch_of
from flowlib.kernels.select_above import counted_blocks
from flowlib.testing import gamma

LENGTHS = (0, 1, 37, 130, 259)
_PAGE, _TOKENS, _LONG, _WIDE = 16, 304, 5_000, 20_000
_K_AND_V: dict[str, Any] = {"head_dim": 64, "group_size": 4, "num_kv_heads": 2}
_LATENT: dict[str, Any] = {"kv_lora_rank": 64, "head_dim": 80, "group_size": 20, "num_kv_heads": 1, "scale": 0.1}
_SUMS = gamma(_LONG)  # fp32 against fp32: sums of that many terms in another order
_RELATIVE_ERROR = 0.05  # bf16 against fp32: a kernel that reads the wrong memory is off by far more


def plan_of(name: str, float8: bool) -> flowlib.Plan:
    """The flow's plan for small sizes, with pages of its own size where it takes no other."""
    flow = flowlib.build(name)
    sizes = _LATENT if isinstance(flow, flowlib.vFlowMLA) else _K_AND_V
    sizes |= {"summary_dtype": torch.float8_e4m3fn if float8 else None, "max_batch": len(LENGTHS)}

    def with_pages(size: int) -> flowlib.Plan:
        return flowlib.profile(flow, flowlib.Spec(page_size=size, top_k=3, max_pages=_TOKENS // size, **sizes))

    try:
        return with_pages(_PAGE)
    except OptionError:
        return with_pages(flow.default_page_size)


def step_flow(name: str, device: str, float8: bool) -> float:
    """The largest relative error of some steps of a flow against their reference."""
    plan = plan_of(name, float8)
    spec, page = plan.spec, plan.spec.page_size
    generator = torch.Generator().manual_seed(0)
    pages = len(LENGTHS) * spec.max_pages
    table = torch.randperm(pages, generator=generator).to(torch.int32).view(len(LENGTHS), -1).to(device)
    pool = flowlib.PagedPool(plan, pages, device)
    k, v = (
        torch.randn(pages * page, spec.num_kv_heads, n, generator=generator).bfloat16().to(device)
        for n in (spec.head_dim, spec.dv)
    )
    pool.write(k, None if spec.is_mla else v, torch.arange(pages * page, device=device), impl="triton")
    q = torch.randn(len(LENGTHS), spec.num_heads, spec.head_dim, generator=generator).bfloat16().to(device)
    batch = flowlib.Batch(table, torch.tensor(LENGTHS, dtype=torch.int32, device=device))
    width = plan.full_pages
    short = flowlib.Batch(table[:, :width], batch.seq_lens.clamp(max=width * page)) if width else None
    answers = []
    for impl, where in (("triton", device), ("reference", "cpu")):
        own, queries, rows = copy_of(pool, where), q.to(where), _moved(batch, where)
        outs = [flowlib.dense(queries, own, rows, impl=impl).o, with_update(plan, queries, own, rows, impl)]
        outs.append(plan.step(queries, own, rows, impl=impl).o)
        outs += [with_update(plan, queries, own, _moved(short, where), impl)] if short else []
        answers.append(outs)
    return max(_error(*pair) for pair in zip(*answers, strict=True))


def _moved(batch: flowlib.Batch, device: str) -> flowlib.Batch:
    return flowlib.Batch(batch.page_table.to(device), batch.seq_lens.to(device))


def copy_of(pool: flowlib.PagedPool, device: str) -> flowlib.KVStore:
    """The same K, V and fields on a device."""
    scales = None if pool.field_scales is None else pool.field_scales.to(device, copy=True)
    v = pool.v.to(device, copy=True) if "v" in pool.given else None
    fields = {name: field.to(device, copy=True) for name, field in pool.fields.items()}
    return flowlib.KVStore(pool.plan, pool.k.to(device, copy=True), v, fields, scales)


def with_update(
    plan: flowlib.Plan, q: torch.Tensor, pool: flowlib.KVStore, batch: flowlib.Batch, impl: str
) -> torch.Tensor:
    """The attention of a step that first updates the pages its rows finish; in Triton in as few launches as it can."""
    page, last = plan.spec.page_size, (batch.seq_lens - 1).clamp(min=0).long()
    slots = batch.page_table.gather(1, last[:, None] // page)[:, 0] * page + last % page
    loc = torch.where(batch.seq_lens > 0, slots, -1)
    if impl == "reference":
        plan.update(pool, loc)
        return plan.step(q, pool, batch).o
    out = plan.allocate(batch.size, batch.width, q.device)
    plan.launch(q, pool, batch, out, loc)
    return out.o


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative, in the 2-norm; infinite where there is a NaN, which a maximum of several would pass over."""
    got, want = got.cpu().float(), want.cpu().float()
    return float(((got - want).norm() / want.norm()).nan_to_num(nan=math.inf))


def select_wide(device: str) -> bool:
    """Whether a row wider than registers hold gets its best pages: the best of each block's, and by a search of all."""
    scores = torch.randn(2, 1, _WIDE, generator=torch.Generator().manual_seed(1)).to(device)
    lengths = torch.tensor([_WIDE * _PAGE], dtype=torch.int32, device=device)
    right = []
    for top_k in (10, 9_000):
        pages, told = (torch.empty(1, 2, *n, dtype=torch.int32, device=device) for n in ((top_k + 2,), ()))
        scratch: dict[str, Any] = {
            name: torch.zeros(1, 2, words, dtype=torch.int32, device=device)
            for name, words in scratch_of(_WIDE, top_k).items()
        }
        launch_select(
            scores, lengths, pages, told, num_kv_heads=2, lanes=1, page_size=_PAGE, bos=1, eos=1, top_k=top_k,
            ratio_q16=0, dense_below=0, scored=True, **scratch,
        )  # fmt: skip
        best = scores.cpu()[:, 0, 1:-1].topk(top_k).indices.sort().values + 1
        right.append(torch.equal(pages[0, :, 1:-1].cpu().long(), best) and told.tolist() == [[top_k + 2] * 2])
    return all(right)


def select_above(device: str) -> bool:
    """Whether a row that several programs share gets every page above -inf, its blocks counted first and not."""
    scores = torch.randn(2, 1, _WIDE, generator=torch.Generator().manual_seed(2)).to(device)
    scores = torch.where(scores > 0, scores, -torch.inf)
    counts = torch.full((1, 2, counted_blocks(_WIDE)), -1, dtype=torch.int32, device=device)
    found = []
    for scratch in (counts, None):
        pages = torch.empty(1, 2, _WIDE, dtype=torch.int32, device=device)
        lengths = torch.empty(1, 2, dtype=torch.int32, device=device)
        launch_select(
            scores, torch.tensor([_WIDE * _PAGE], dtype=torch.int32, device=device), pages, lengths, num_kv_heads=2,
            lanes=1, page_size=_PAGE, bos=0, eos=0, top_k=1 << 30, ratio_q16=0, dense_below=0, scored=True,
            counts=scratch,
        )  # fmt: skip
        found.append(pages.cpu())
    best = [torch.nonzero(row[0] > 0)[:, 0] for row in scores.cpu()]
    return all(torch.equal(pages[0, h, : len(own)].long(), own) for pages in found for h, own in enumerate(best))


def decode_entmax(device: str) -> bool:
    """Whether an entmax row with more tokens than registers hold is right, by either selection."""
    generator = torch.Generator().manual_seed(3)
    k, v, q = (torch.randn(1, 2, n, 32, generator=generator).half() for n in (4500, 4500, 1))
    answers = []
    for impl, where in (("triton", device), ("reference", "cpu")):
        cache = flowlib.PagedKVCache(page_size=_PAGE, stats=("topk", "gaussian"))
        cache.initialize(k.to(where), v.to(where))
        queries = q.to(where)
        outs = [torch.empty_like(queries), torch.empty_like(queries)]
        topk_decode(queries, cache, None, None, outs[0], 270, append_cache=False, impl=impl)
        gaussian_decode(queries, cache, None, None, outs[1], impl=impl)
        answers.append(outs)
    return all(_error(*pair) <= _RELATIVE_ERROR for pair in zip(*answers, strict=True))


def sum_in_parts(device: str) -> bool:
    """Whether a threshold is the same from moments that many programs sum and from those of one."""
    generator = torch.Generator().manual_seed(5)
    mu, sigma = (torch.rand(2, 3, _LONG, generator=generator).to(device) for _ in range(2))
    lengths = torch.tensor([_LONG * _PAGE], dtype=torch.int32, device=device)
    parts = torch.empty(2, 3, parts_of(_LONG), 3, device=device)
    taus = [torch.empty(2, 3, device=device) for _ in range(2)]
    for tau, moments in zip(taus, (parts, None), strict=True):
        launch_gaussian_tau(
            mu, sigma, tau, lengths, num_kv_heads=2, page_size=_PAGE, bos=0, eos=1, alpha=1.5, safety_margin_z=0.5,
            excess=0.1, mixture=False, moments=moments,
        )  # fmt: skip
    return _error(*taus) <= _SUMS


def along_pages(device: str) -> bool:
    """Whether a convolution and both norms over the scored pages of rows of odd lengths are right."""
    x = torch.rand(len(LENGTHS) * 2, 3, _TOKENS, generator=torch.Generator().manual_seed(6))
    lengths, weight = torch.tensor(LENGTHS, dtype=torch.int32), (0.25, 0.5, 0.125)
    bounds: dict[str, Any] = {"num_kv_heads": 2, "page_size": 1, "bos": 1, "eos": 2}
    wanted, found = [torch.zeros_like(x) for _ in range(3)], []
    for row, own in enumerate(x):
        first, last = 1, LENGTHS[row // 2] - 2
        if last > first:
            part = own[:, first:last]
            wanted[0][row, :, first:last] = part / part.sum(1, keepdim=True)
            wanted[1][row, :, first:last] = part / part.norm(dim=1, keepdim=True)
            kernel = torch.tensor(weight)[None, None]
            wanted[2][row, :, first:last] = torch.nn.functional.conv1d(part[:, None], kernel, padding=1)[:, 0]
    there, y = x.to(device), torch.zeros(x.shape, device=device)
    for squared in (False, True):
        launch_normalize(there, y, lengths.to(device), squared=squared, **bounds)
        found.append(y.cpu())
        y = torch.zeros_like(y)
    launch_conv1d(there, y, lengths.to(device), weight=weight, **bounds)
    found.append(y.cpu())
    return max(_error(*pair) for pair in zip(found, wanted, strict=True)) <= _SUMS


def prefill_latents(device: str) -> bool:
    """Whether new tokens over two chunks of latents attend as in the reference."""
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(6, 2, n, generator=generator).bfloat16() for n in (80, 80, 64))
    cache = torch.randn(4, _PAGE, 96, generator=generator).bfloat16()
    weight = (torch.randn(80, 2 * (64 + 64), generator=generator) / 9).bfloat16()
    table = torch.tensor([[3, 0, 2], [1, 1, 1]], dtype=torch.int32)
    answers = []
    for impl, where in (("triton", device), ("reference", "cpu")):
        context = mla.build_chunked_context([37, 4], [0, 3, 6], 2 * _PAGE, _PAGE, device=where)
        up = mla.up_projection(weight.to(where), 2, 64)
        done = mla.chunked_prefill(
            q.to(where), k.to(where), v.to(where), cache.to(where), table.to(where), context, up, scale=0.1, impl=impl,
            attention=impl,
        )  # fmt: skip
        answers.append(done.o)
    return _error(*answers) <= _RELATIVE_ERROR


def plan_pages(device: str) -> bool:
    """Whether the page table of a step is read off a token table."""
    slots = (torch.randperm(8, device=device)[:, None] * _PAGE + torch.arange(_PAGE, device=device)).view(2, -1).int()
    table = torch.full((2, 4), -1, dtype=torch.int32, device=device)
    lengths = torch.tensor([64, 17], dtype=torch.int32, device=device)
    launch_page_table(slots, torch.tensor([1, 0], device=device), lengths, table, page_size=_PAGE)
    want = slots.view(2, 4, _PAGE)[:, :, 0] // _PAGE
    return torch.equal(table[0], want[1]) and table[1].tolist() == [*want[0, :2].tolist(), -1, -1]


CASES = {
    "wide rows": select_wide, "rows without a budget": select_above, "page table": plan_pages,
    "long entmax rows": decode_entmax, "long rows' moments": sum_in_parts, "ops along the pages": along_pages,
    "prefill in chunks": prefill_latents,
}  # fmt: skip


def main(
    flow: Annotated[list[str] | None, typer.Option(help="A flow; all where none is given.")] = None,
    device: Annotated[str, typer.Option(help="cuda, or cpu to interpret the kernels.")] = "cuda",
) -> None:
    """Runs the small cases and compares them with the reference."""
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 120)
    wrong = 0
    for name in flow or flowlib.list_flows():
        for float8 in (False, True):
            label = f"{name}{' (float8 summaries)' if float8 else ''}"
            try:
                error = step_flow(name, device, float8)
            except FlowlibError as refusal:
                console.print(f"{label}: refused: {refusal}")
                continue
            wrong += not error <= _RELATIVE_ERROR
            console.print(f"{label}: {'ok' if error <= _RELATIVE_ERROR else 'WRONG'}, relative error {error:.1e}")
    for what, check in CASES.items():
        good = check(device)
        wrong += not good
        console.print(f"{what}: {'ok' if good else 'WRONG'}")
    raise typer.Exit(1 if wrong else 0)


if __name__ == "__main__":
    typer.run(main)
