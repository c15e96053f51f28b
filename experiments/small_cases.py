"""One small case of every kernel, to run under a tool that watches memory.

    compute-sanitizer --tool memcheck python experiments/small_cases.py
    compute-sanitizer --tool racecheck python experiments/small_cases.py --flow quest --flow block_sparse

Every registered flow writes a pool, updates its fields, and steps once in Triton over rows of odd lengths whose pages
are scattered, a row of one token and an empty one among them; rows wider than registers hold are selected, too. Results
are compared with the reference, so that a run says that the kernels ran.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

import flowlib
from flowlib.errors import FlowlibError
from flowlib.kernels.planning import launch_page_table
from flowlib.kernels.select import launch_select

LENGTHS = (0, 1, 37, 130, 259)
_PAGE, _WIDTH, _WIDE = 16, 19, 20_000
_K_AND_V: dict[str, Any] = {"head_dim": 64, "group_size": 4, "num_kv_heads": 2}
_LATENT: dict[str, Any] = {"kv_lora_rank": 64, "head_dim": 80, "group_size": 20, "num_kv_heads": 1, "scale": 0.1}
_RELATIVE_ERROR = 0.05  # bf16 against fp32: a kernel that reads the wrong memory is off by far more


def step_flow(name: str, device: str, float8: bool) -> float:
    """The relative error of one step of a flow against its reference."""
    flow = flowlib.build(name)
    spec = flowlib.Spec(
        page_size=_PAGE, top_k=3, max_pages=_WIDTH, max_batch=len(LENGTHS),
        summary_dtype=torch.float8_e4m3fn if float8 else None,
        **(_LATENT if isinstance(flow, flowlib.vFlowMLA) else _K_AND_V),
    )  # fmt: skip
    plan = flowlib.profile(flow, spec)
    generator = torch.Generator().manual_seed(0)
    pages = len(LENGTHS) * _WIDTH
    table = torch.randperm(pages, generator=generator).to(torch.int32).view(len(LENGTHS), _WIDTH).to(device)
    pool = flowlib.PagedPool(plan, pages, device)
    k, v = (
        torch.randn(pages * _PAGE, spec.num_kv_heads, n, generator=generator).bfloat16().to(device)
        for n in (spec.head_dim, spec.dv)
    )
    pool.write(k, None if spec.is_mla else v, torch.arange(pages * _PAGE, device=device), impl="triton")
    q = torch.randn(len(LENGTHS), spec.num_heads, spec.head_dim, generator=generator).bfloat16().to(device)
    batch = flowlib.Batch(table, torch.tensor(LENGTHS, dtype=torch.int32, device=device))
    twin = pool.clone()
    got = plan.step(q, pool, batch, impl="triton").o.float()
    dense = flowlib.dense(q, pool, batch, impl="triton").o.float()
    want = plan.step(q, twin, batch).o.float()
    whole = flowlib.dense(q, twin, batch).o.float()
    return float(torch.maximum((got - want).norm() / want.norm(), (dense - whole).norm() / whole.norm()))


def select_wide(device: str) -> bool:
    """Whether a row wider than registers hold gets its best pages."""
    scores = torch.randn(2, 1, _WIDE, generator=torch.Generator().manual_seed(1)).to(device)
    pages = torch.empty(1, 2, 12, dtype=torch.int32, device=device)
    lengths = torch.empty(1, 2, dtype=torch.int32, device=device)
    launch_select(
        scores, torch.tensor([_WIDE * _PAGE], dtype=torch.int32, device=device), pages, lengths,
        num_kv_heads=2, lanes=1, page_size=_PAGE, bos=1, eos=1, top_k=10, ratio_q16=0, dense_below=0, scored=True,
    )  # fmt: skip
    best = scores[:, 0, 1:-1].topk(10).indices.sort().values + 1
    return torch.equal(pages[0, :, 1:-1].long(), best) and lengths.tolist() == [[12, 12]]


def plan_pages(device: str) -> bool:
    """Whether the page table of a step is read off a token table."""
    slots = (torch.randperm(8, device=device)[:, None] * _PAGE + torch.arange(_PAGE, device=device)).view(2, -1).int()
    table = torch.full((2, 4), -1, dtype=torch.int32, device=device)
    lengths = torch.tensor([64, 17], dtype=torch.int32, device=device)
    launch_page_table(slots, torch.tensor([1, 0], device=device), lengths, table, page_size=_PAGE)
    want = slots.view(2, 4, _PAGE)[:, :, 0] // _PAGE
    return torch.equal(table[0], want[1]) and table[1].tolist() == [*want[0, :2].tolist(), -1, -1]


def main(
    flow: Annotated[list[str] | None, typer.Option(help="A flow; all where none is given.")] = None,
    device: Annotated[str, typer.Option(help="cuda, or cpu to interpret the kernels.")] = "cuda",
) -> None:
    """Runs one small case of every kernel and compares it with the reference."""
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
    for what, check in (("wide rows", select_wide), ("page table", plan_pages)):
        good = check(device)
        wrong += not good
        console.print(f"{what}: {'ok' if good else 'WRONG'}")
    raise typer.Exit(1 if wrong else 0)


if __name__ == "__main__":
    typer.run(main)
