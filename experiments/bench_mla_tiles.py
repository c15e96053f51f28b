"""Tile sizes of the two attention kernels over latents, timed one after the other: (rows, tokens, warps, stages).

Decode: 130 pages of 16 tokens for each of 16 requests, drawn at random from a large pool, other ones in every call.
Prefill: keys and values as the up-projection leaves them. A tile size that does not fit the GPU, or computes something
wrong, is noted; a wrong answer of the built-in one makes the gate red.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from bench_gate import Verdict
from bench_mla_problem import rounded, weighted
from bench_mla_shapes import BenchError
from bench_peers import short
from bench_pools import needed
from bench_timing import Timed, capture, replay
from mla_cases import DEEPSEEK, Sizes
from triton.errors import TritonError

Tile = tuple[int, int, int, int]
KERNELS = ("decode", "prefill")
TILES: dict[str, tuple[Tile, ...]] = {
    "decode": (
        (16, 32, 4, 2), (16, 32, 4, 3), (16, 32, 4, 4), (16, 64, 4, 2), (16, 64, 4, 3), (16, 64, 8, 3), (32, 32, 4, 3),
        (32, 32, 8, 3), (32, 32, 8, 4), (32, 64, 8, 2), (32, 64, 8, 3), (64, 16, 4, 4), (64, 16, 8, 4), (64, 32, 4, 3),
        (64, 32, 8, 2), (64, 32, 8, 3), (64, 32, 8, 4), (64, 64, 8, 1), (64, 64, 8, 2),
    ),
    "prefill": (
        (16, 64, 4, 2), (16, 64, 4, 3), (16, 64, 4, 4), (16, 64, 4, 5), (16, 128, 4, 2), (16, 128, 4, 3),
        (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (128, 32, 8, 3), (128, 32, 8, 4), (128, 64, 8, 1),
        (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 1), (128, 128, 8, 2), (256, 64, 8, 2),
    ),
}  # fmt: skip
SPLITS = (4, 8, 16)
_PAGE, _PAGES, _REQUESTS = 16, 130, 16


@dataclass(frozen=True)
class TileRow:
    """One tile size of one kernel on one case.

    Attributes:
        kernel, case: which.
        tile: rows (query heads or queries), tokens, warps, stages.
        splits: programs that share a list.
        time: of a launch.
        rate: what that is in TB/s or TFLOP/s.
        usual: whether it is the built-in one.
    """

    kernel: str
    case: str
    tile: Tile
    splits: int
    time: Timed
    rate: str
    usual: bool


@dataclass(frozen=True)
class Case:
    """A kernel on inputs.

    Attributes:
        kernel, name: which.
        launch: runs one of `turns` calls with a tile size (None: the built-in one) and splits; returns o.
        usual: the built-in tile size, and splits.
        splits: numbers of splits to try.
        turns: calls on inputs of their own.
        errors: (relative error, allowed one) of o of call 0, by sampled row.
        unit: of the rate; amount: how many of them a call moves or computes.
    """

    kernel: str
    name: str
    launch: Callable[[int, Tile | None, int], torch.Tensor]
    usual: tuple[Tile, int]
    splits: tuple[int, ...]
    turns: int
    errors: Callable[[torch.Tensor], list[tuple[str, float, float]]]
    unit: str
    amount: float


def parse_tile(text: str) -> tuple[str, Tile]:
    """Kernel and tile size of ``decode:64,32,8,2``.

    Raises:
        BenchError: it is none.
    """
    kernel, _, numbers = text.partition(":")
    try:
        rows, tokens, warps, stages = (int(n) for n in numbers.split(","))
    except ValueError:
        rows = tokens = warps = stages = 0
    if kernel not in KERNELS or min(rows, tokens, warps, stages) < 1:
        raise BenchError(f"--tile {text}: expected decode:HEADS,TOKENS,WARPS,STAGES or prefill:QUERIES,KEYS,...")
    return kernel, (rows, tokens, warps, stages)


def cases(device: str, l2: int, heads: Sequence[int], sizes: Sizes = DEEPSEEK, small: bool = False) -> list[Case]:
    """The cases of both kernels; with `small` in little memory and time."""
    if small:
        return [decode_case(device, l2, heads[0], sizes, 5, 2), prefill_case(device, 20, 70, 2, sizes)]
    decode = [decode_case(device, l2, count, sizes, _PAGES, _REQUESTS) for count in heads]
    shapes = (4096, 16384, 32), (16, 60_000, 128)
    return [*decode, *(prefill_case(device, *shape, sizes) for shape in shapes)]


def decode_case(device: str, l2: int, heads: int, sizes: Sizes, pages: int, requests: int) -> Case:
    """Attention of `requests` requests over lists of `pages` pages."""
    from flowlib.kernels import attend_mla
    from flowlib.runtime.execute import has_pdl

    generator = torch.Generator(device).manual_seed(heads)
    read = requests * pages * _PAGE * sizes.latent * 2
    turns = min(64, needed(read, l2))
    size = {"dtype": torch.bfloat16, "device": device}
    latent = torch.empty(turns * requests * pages * _PAGE, 1, sizes.latent, **size).normal_(generator=generator)  # type: ignore[arg-type]
    q = torch.empty(requests, heads, sizes.latent, **size).normal_(generator=generator)  # type: ignore[arg-type]
    order = torch.randperm(turns * requests * pages, generator=torch.Generator().manual_seed(heads))
    physical = order.to(device, torch.int32).view(turns, requests, 1, pages)
    logical = torch.arange(pages, dtype=torch.int32, device=device).expand(requests, 1, pages).contiguous()
    lengths = torch.full((requests, 1), pages, dtype=torch.int32, device=device)
    seq_lens = torch.full((requests,), pages * _PAGE - 3, dtype=torch.int32, device=device)
    out = torch.empty(requests, heads, sizes.rank, **size)  # type: ignore[arg-type]
    lse = torch.empty(requests, heads, device=device)
    most = max(*SPLITS, attend_mla.num_splits(pages, _PAGE, requests, heads, 2))
    partial = torch.empty(requests * heads * most * sizes.rank, device=device)
    partial_lse = torch.empty(requests * heads * most, device=device)

    def launch(turn: int, tile: Tile | None, splits: int) -> torch.Tensor:
        attend_mla.launch_attend_mla(
            q, latent, latent[..., : sizes.rank], physical[turn][:, 0], seq_lens, logical, lengths, out, lse, partial,
            partial_lse, num_kv_heads=1, group_size=heads, lanes=1, page_size=_PAGE, scale=sizes.scale,
            k_scale=1.0, v_scale=1.0, num_splits=splits, physical=physical[turn], pdl=has_pdl(out.device), tile=tile,
        )  # fmt: skip
        return out

    def errors(o: torch.Tensor) -> list[tuple[str, float, float]]:
        found = []
        for request, head in ((0, 0), (requests - 1, heads - 1)):
            places = physical[0, request, 0].long()[:, None] * _PAGE + torch.arange(_PAGE, device=device)
            rows = latent[places.flatten()[: pages * _PAGE - 3], 0].double()
            error = _error(o[request, head], q[request, head], rows, rows[:, : sizes.rank], sizes.scale)
            found.append((f"request {request}, head {head}", *error))
        return found

    usual = attend_mla.built_in_tile(heads, 2, sizes.rank, sizes.latent)
    splits = attend_mla.num_splits(pages, _PAGE, requests, heads, 2)
    name = f"{requests} x {pages * _PAGE:,} selected, {heads} heads"
    chosen = tuple(dict.fromkeys((splits, *SPLITS)))
    return Case("decode", name, launch, (usual, splits), chosen, turns, errors, "TB/s", read / 1e12)


def prefill_case(device: str, new: int, keys: int, heads: int, sizes: Sizes) -> Case:
    """`new` queries of one request over `keys` keys, all of which they see."""
    from flowlib.kernels import mla_attend

    generator = torch.Generator(device).manual_seed(new)

    def normal(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(generator=generator)

    q, k = normal(new, heads, sizes.key), normal(keys, heads, sizes.key)
    v = normal(keys, heads, sizes.nope + sizes.dv)[..., sizes.nope :]
    starts, ends = (torch.tensor((0, n), dtype=torch.int32, device=device) for n in (new, keys))
    out, lse = torch.empty(new, heads, sizes.dv, device=device), torch.empty(new, heads, device=device)

    def launch(turn: int, tile: Tile | None, splits: int) -> torch.Tensor:
        mla_attend.launch_attend_ragged(
            q, k, v, starts, ends, out, lse, scale=sizes.scale, causal=False, max_query_len=new, tile=tile
        )
        return out

    def errors(o: torch.Tensor) -> list[tuple[str, float, float]]:
        return [
            (f"query {i}, head {h}", *_error(o[i, h], q[i, h], k[:, h].double(), v[:, h].double(), sizes.scale))
            for i, h in ((0, 0), (new - 1, heads - 1))
        ]

    flops = 2.0 * new * keys * heads * (sizes.key + sizes.dv)
    usual = mla_attend.built_in_tile(tl.bfloat16, new, sizes.key, sizes.dv)
    name = f"{new:,} over {keys:,}, {heads} heads"
    return Case("prefill", name, launch, (usual, 1), (1,), 1, errors, "TFLOP/s", flops / 1e12)


def _error(
    o: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[float, float]:
    """Relative error of o in the 2-norm, and twice that of a plain evaluation with rounded weights and o."""
    scores = k @ q.double() * scale
    exact = scores.softmax(0) @ v
    low, size = rounded(weighted(scores) @ v), float(exact.norm())
    error = float((o.double() - exact).norm()) / size
    allowed = 2 * float((low - exact).norm()) / size + torch.finfo(torch.bfloat16).eps
    return math.inf if math.isnan(error) else error, allowed


def gate(case: Case) -> list[Verdict]:
    """Verdicts on the built-in tile size."""
    rows = case.errors(_fresh(case, None, case.usual[1]))
    name = f"{case.kernel}, tile {case.usual[0]}"
    return [Verdict(name, case.name, "o", row, error, most, error <= most) for row, error, most in rows]


def _fresh(case: Case, tile: Tile | None, splits: int) -> torch.Tensor:
    """o of call 0, of which nothing was there before."""
    case.launch(0, None, case.usual[1]).fill_(torch.nan)
    return case.launch(0, tile, splits)


def sweep(case: Case, tiles: Sequence[Tile], seconds: float, note: Callable[[str], None]) -> list[TileRow]:
    """Times of a case with each tile size and number of splits."""
    rows, pool = [], torch.cuda.graph_pool_handle()
    for tile in dict.fromkeys((case.usual[0], *tiles)):
        where = f"{case.kernel}, {case.name}, tile {tile}"
        for splits in case.splits:
            try:
                wrong = [e for e in case.errors(_fresh(case, tile, splits)) if not e[1] <= e[2]]
                if wrong:
                    note(f"{where} is wrong: off by {wrong[0][1]:.2g}, expected at most {wrong[0][2]:.2g}")
                    break
                rows.append(_timed(case, tile, splits, seconds, pool))
            except (TritonError, RuntimeError, ValueError) as error:
                note(f"{where} does not run: {short(error)}")
                break
    return rows


def _timed(case: Case, tile: Tile, splits: int, seconds: float, pool: Any) -> TileRow:
    calls = [functools.partial(case.launch, turn, tile, splits) for turn in range(case.turns)]
    found = replay([capture(calls, pool)], len(calls), seconds, 3)
    rate = f"{1e6 * case.amount / found.us:.2f} {case.unit}"
    return TileRow(case.kernel, case.name, tile, splits, found, rate, (tile, splits) == case.usual)
