"""Every case of chunked latent prefill with known numbers, as tables that say what came out and whether it is right."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from mla_cases import (
    BACKEND_SHAPES,
    GATE,
    LOOP_CASES,
    MORE_CASES,
    SMALL_CASES,
    Case,
    backend_case,
    gathered,
    lcg,
    merged,
    offsets,
    problem,
)
from mla_mutations import CASES, KNOWN, ORDER_FREE, mutated, run

from flowlib import mla
from flowlib.errors import BackendError, OptionError

MERGE_TOLERANCE = 1e-5
LSE_GATE = 1e-4
"""Of a log-sum-exp of size 1 to 8 kept in fp32; a lost or doubled key moves one by 2e-3 or more."""


@dataclass(frozen=True)
class Row:
    """A line of a table."""

    cells: tuple[str, ...]
    ok: bool


@dataclass(frozen=True)
class Section:
    """A table."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        """Whether every line is right and there is one."""
        return bool(self.rows) and all(row.ok for row in self.rows)


def equal(name: str, got: object, wanted: object) -> Row:
    """A line that is right if both are the same."""
    return Row((name, str(got), str(wanted)), got == wanted)


WORKSPACE_CASES = {
    (163840, 256, 16): 65536, (4096, 8, 16): 32768, (64, 256, 16): 16384, (1, 1024, 128): 131072, (1, 1024, 64): 65536,
}  # fmt: skip
"""(max_model_len, max_num_seqs, page_size) to rows."""


def check_workspace() -> Section:
    """Workspace sizes."""
    rows = tuple(equal(str(given), mla.workspace_rows(*given), rows) for given, rows in WORKSPACE_CASES.items())
    return Section("Workspace (max_model_len, max_num_seqs, page_size)", ("case", "rows", "expected"), rows)


EVEN_CASES: tuple[tuple[tuple[int, ...], tuple[int, ...], int, int, dict[str, object]], ...] = (
    (
        (700, 512, 256, 600), (4, 4, 4, 4), 1024, 16,
        {
            "max_context_chunk": 256, "num_chunks": 3, "prefill_tokens_with_context": 16, "num_prefills": 4,
            "starts": [[0] * 4, [256] * 4, [512] * 4],
            "lens": [[256, 256, 256, 256], [256, 256, 0, 256], [188, 0, 0, 88]],
            "cu_seq_lens": [[0, 256, 512, 768, 1024], [0, 256, 512, 512, 768], [0, 188, 188, 188, 276]],
            "seq_tot": (1024, 768, 276), "max_seq_lens": (256, 256, 188), "max_token_num_over_chunk": 1024,
        },
    ),
    ((900, 700, 100), (4, 4, 4), 1000, 64, {"max_context_chunk": 320, "num_chunks": 3}),
    ((0, 0), (4, 4), 1000, 64, {"num_chunks": 0, "prefill_tokens_with_context": 0, "max_token_num_over_chunk": 0}),
    (
        (300, 0, 0), (7, 11, 13), 512, 16,
        {"max_context_chunk": 512, "num_chunks": 1, "lens": [[300, 0, 0]], "prefill_tokens_with_context": 7},
    ),
    ((0, 300), (7, 11), 512, 16, {"num_chunks": 1, "prefill_tokens_with_context": 18, "gaps": ((0, 7),)}),
)  # fmt: skip
"""context, new tokens, workspace, page, and what the even grid must have."""


def check_even() -> Section:
    """The even grid."""
    rows = []
    for context, queries, workspace, page, wanted in EVEN_CASES:
        built = mla.build_chunked_context(context, offsets(queries), workspace, page, "even")
        for name, value in wanted.items():
            got = getattr(built, name)
            got = got.tolist() if isinstance(got, torch.Tensor) else got
            rows.append(equal(f"{list(context)} in {workspace}, pages of {page}: {name}", got, value))
    owners = mla.build_chunked_context((700, 512, 256, 600), offsets((4,) * 4), 1024, 16, "even").token_to_seq
    got = owners[2, [0, 187, 188, 275, 276]].tolist()
    rows.append(equal("token_to_seq[2] at 0, 187, 188, 275 and past the end", got, [0, 0, 3, 3, 0]))
    try:
        said = str(mla.build_chunked_context((64,) * 4, offsets((4,) * 4), 32, 64, "even").num_chunks)
    except OptionError as error:
        said = str(error)
    rows.append(Row(("[64, 64, 64, 64] in 32, pages of 64", said, "refused"), "expected at least 256" in said))
    return Section("Even grid", ("case", "got", "expected"), tuple(rows))


PACKED_CASES: tuple[tuple[tuple[int, ...], int, tuple[bool, ...]], ...] = (
    ((960, *[16] * 7), 1024, (False, False)),
    ((2048, 320), 1024, (False, True, False)),
    ((1024, 1024, 1024), 1024, (False, False, False)),
    ((37, 1000, 5), 1024, (False, True)),
    ((1,), 1024, (False,)),
    ((2048, 32, 32), 1024, (False, True, False)),
    ((64, 0, 64, 0), 1024, (False,)),
    ((0, 0), 1024, ()),
    ((60_000, *[16] * 31), 65536, (False,)),
)
"""context, workspace, and whether each chunk continues a request; pages of 16."""


def faults(built: mla.ChunkedContext, context: Sequence[int], workspace: int, page: int) -> list[str]:
    """What is wrong with a packed schedule; an empty list if nothing is."""
    found, done = [], [0] * len(context)
    for i, (starts, lens) in enumerate(zip(built.starts.tolist(), built.lens.tolist(), strict=True)):
        present = [b for b, n in enumerate(lens) if n]
        if sum(lens) > workspace or not present:
            found.append(f"chunk {i} has {sum(lens)} rows")
        for b in present:
            if starts[b] != done[b]:
                found.append(f"chunk {i} begins request {b} at {starts[b]}, {done[b]} are done")
            if starts[b] % page or (starts[b] and b != present[0]):
                found.append(f"chunk {i} has request {b} from {starts[b]}")
            done[b] += lens[b]
    return found if done == list(context) else [*found, f"rows done {done}"]


def check_packed() -> Section:
    """The packed schedule."""
    rows = []
    for context, workspace, continues in PACKED_CASES:
        built = mla.build_chunked_context(context, offsets([4] * len(context)), workspace, 16)
        wrong = faults(built, context, workspace, 16)
        even = mla.build_chunked_context(context, offsets([4] * len(context)), workspace, 16, "even").num_chunks
        shown = str(list(context)) if len(context) < 9 else f"[{context[0]}, {len(context) - 1} x {context[-1]}]"
        flags = "".join("T" if f else "F" for f in built.continues) or "no chunk"
        cells = (f"{shown} in {workspace}", str(built.num_chunks), flags, str(even), "; ".join(wrong) or "-")
        rows.append(Row(cells, built.continues == continues and not wrong))
    built = mla.build_chunked_context((64, 0, 64, 0), offsets((4,) * 4), 1024, 16)
    got = built.covered, built.prefill_tokens_with_context, built.gaps
    rows.append(Row(("[64, 0, 64, 0]: covered, tokens with context, gaps", str(got), "", "", "-"),
                    got == ((0, 2), 12, ((4, 8),))))  # fmt: skip
    return Section("Packed schedule", ("case", "chunks", "continues", "chunks, even grid", "faults"), tuple(rows))


def check_gather(impls: Iterable[str], device: str) -> Section:
    """Rows must come back bit by bit."""
    lens, starts, blocks, page = (35, 0, 17), (32, 0, 16), 24, 16
    table = torch.tensor([[blocks - 1 - (p * 3 + i) for p in range(8)] for i in range(3)], dtype=torch.int32)
    owner = torch.repeat_interleave(torch.tensor(lens)).to(torch.int32)
    pages, ends, owner = (x.to(device) for x in (table, torch.tensor(offsets(lens), dtype=torch.int32), owner))
    rows = []
    for impl, dtype, given in itertools.product(impls, (torch.float32, torch.bfloat16), (starts, None)):
        cache = lcg(77, blocks, page, 576).to(dtype)
        wanted = gathered(cache, table, lens, given or (0, 0, 0))
        out = torch.full((55, 576), 7.0, dtype=dtype, device=device)
        first = None if given is None else torch.tensor(given, dtype=torch.int32, device=device)
        mla.gather_latent(cache.to(device), pages, ends, owner, 52, out, first, impl)
        same = torch.equal(out[:52].cpu(), wanted)
        untouched = bool((out[52:] == 7.0).all())
        name = str(dtype).removeprefix("torch.")
        cells = (impl, name, str(given or "absent"), "equal" if same else "differ", "untouched" if untouched else "hit")
        rows.append(Row(cells, same and untouched))
    columns = ("impl", "dtype", "starts", "52 rows, bitwise", "rows past the end")
    return Section("Gather, lengths 35, 0, 17", columns, tuple(rows))


def merge_case() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """prefix ``[6, 4, 32]``, its log-sum-exp ``[4, 6]``, the suffix and its own, with every infinity."""
    flat = torch.arange(24)
    p_lse, s_lse = ((flat % 7) * 0.5 - 1).view(4, 6).float(), ((flat % 5) * 0.25 + 0.125).view(4, 6).float()
    p_lse[0, 1] = p_lse[1, 2] = s_lse[1, 2] = -math.inf
    p_lse[2, 3] = math.inf
    return lcg(3, 6, 4, 32).float(), p_lse, lcg(5, 6, 4, 32).float(), s_lse


def distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest distance; equal infinities are none, and a NaN on one side is infinite."""
    got, wanted = got.detach().double(), wanted.to(got.device).double()
    apart = torch.where(got == wanted, 0.0, (got - wanted).abs())
    apart = torch.where(apart.isnan(), math.inf, apart)
    return float(apart.max())


def check_merge(impls: Sequence[str], device: str, full: bool) -> Section:
    """The case with every infinity, then vLLM's matrix."""
    rows = []
    for impl in impls:
        p, p_lse, s, s_lse = merge_case()
        out, out_lse = (torch.full(shape, math.nan, device=device) for shape in ((6, 4, 32), (6, 4)))
        p, p_lse, s, s_lse = (x.to(device) for x in (p, p_lse.t(), s, s_lse.t()))
        mla.merge_attn_states(p, p_lse, s, s_lse, out, out_lse, 4, impl=impl)
        o, lse = merged(p.cpu(), p_lse.cpu(), s.cpu(), s_lse.cpu(), 4)
        errors = distance(out, o), distance(out_lse, lse)
        cells = (impl, "6", "4", "32", "float32", "4", *(f"{e:.1e}" for e in errors), f"{MERGE_TOLERANCE:.0e}")
        rows.append(Row(cells, max(errors) <= MERGE_TOLERANCE))
    tokens, heads, sizes = (256, 512, 613, 1024, 1536, 4096), (4, 8, 16, 32, 48, 64), (32, 48, 64, 96, 128, 256)
    shapes = list(itertools.product(tokens, heads, sizes))
    chosen = shapes if full else [shapes[0], shapes[80], shapes[119]]
    for impl, shape, limit in itertools.product(impls, chosen, (None, 128)):
        small = impl == "triton" and device == "cpu"
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            if not small or (dtype is torch.bfloat16 and shape == chosen[0]):
                rows.append(_matrix_row(impl, shape, limit, dtype, device))
    columns = ("impl", "tokens", "heads", "dim", "dtype", "with context", "error", "error of lse", "allowed")
    return Section("Merge", columns, tuple(rows))


def _matrix_row(impl: str, shape: tuple[int, int, int], limit: int | None, dtype: torch.dtype, device: str) -> Row:
    """A tenth of each side's log-sum-exp is +inf, never both."""
    generator = torch.Generator(device).manual_seed(shape[0] + shape[1])
    where: dict[str, Any] = {"generator": generator, "device": device}
    p, s = (torch.randn(shape, **where).to(dtype) for _ in range(2))
    p_lse, s_lse = (torch.randn(shape[:2], **where) for _ in range(2))
    draw = torch.rand(shape[:2], **where)
    p_lse[draw < 0.1], s_lse[draw > 0.9] = math.inf, math.inf
    out, out_lse = torch.full(shape, math.nan, dtype=dtype, device=device), torch.full(shape[:2], math.nan).to(device)
    mla.merge_attn_states(p, p_lse, s, s_lse, out, out_lse, limit, impl=impl)
    o, lse = merged(p, p_lse, s, s_lse, shape[0] if limit is None else limit)
    relative = 1e-2 if dtype is torch.bfloat16 else 1e-3
    beyond = (out.double() - o).abs() / (1e-3 + relative * o.abs())
    error = float(torch.where(beyond.isnan(), math.inf, beyond).max())
    lse_error = distance(out_lse, lse)
    name = str(dtype).removeprefix("torch.")
    shown = f"{error:.2f} x", f"{lse_error:.1e}", f"1e-3 + {relative:.0e} x"
    cells = (impl, *map(str, shape), name, str(limit), *shown)
    return Row(cells, error <= 1.0 and lse_error <= 1e-3)


def check_keyless(impls: Iterable[str], device: str) -> Section:
    """Queries of a request without keys among others: output 0 and log-sum-exp -inf, for them alone."""
    batch = mla.RaggedBatch.of((0, 2, 133, 134), (0, 4, 4, 7), device)
    rows = []
    for name in dict.fromkeys(name for impl in impls for name in _attentions(impl, device)):
        if unavailable(name, torch.bfloat16, LOOP_CASES[0], device):
            continue
        given = lcg(1, 134, 4, 192), lcg(2, 7, 4, 192), lcg(3, 7, 4, 128)
        q, k, v = (x.to(device, torch.bfloat16) for x in given)
        o, lse = mla.varlen_attention(q, k, v, batch, scale=0.1, causal=False, attention=name)
        empty = (lse == -math.inf).all(1).nonzero().flatten().tolist()
        exact = empty == list(range(2, 133)) and bool((o[2:133] == 0).all()) and bool(o.isfinite().all())
        cells = (name, f"{empty[0]} .. {empty[-1]}" if empty else "none", "2 .. 132", str(batch.unseeing(False)))
        rows.append(Row(cells, exact and bool(lse[[0, 1, 133]].isfinite().all())))
    columns = ("attention", "tokens with log-sum-exp -inf", "expected", "known without a device")
    return Section("Queries [2, 131, 1] over keys [4, 0, 3]", columns, tuple(rows))


def loop_cases(impl: str, device: str, full: bool) -> list[Case]:
    """All of them; few and small ones where kernels are interpreted."""
    if impl == "triton" and device == "cpu":
        chosen = [c for c in (*LOOP_CASES, *MORE_CASES) if c.name in ("single", "no-ctx", "context-free middle")]
        return [*chosen, *SMALL_CASES[8:16]]
    heads = 16 if full else 2
    backends = [backend_case(name, *shape, heads) for name, shape in BACKEND_SHAPES.items()]
    return [*LOOP_CASES, *MORE_CASES, *SMALL_CASES, *backends]


def check_loop(impl: str, device: str, full: bool) -> Iterator[Row]:
    """The whole loop against one causal attention in float64."""
    for case in loop_cases(impl, device, full):
        made = problem(case, device)
        names = [n for n in _attentions(impl, device) if not unavailable(n, made.q.dtype, case, device)]
        for schedule, attention in itertools.product(("packed", "even"), names):
            if schedule == "even" and case.workspace // max(1, sum(c > 0 for c in case.context)) < case.page:
                continue
            built = mla.build_chunked_context(case.context, case.query_start_loc, case.workspace, case.page, schedule)
            done = run(made, schedule, impl, attention=attention)
            error, lse_error = made.error(done.o), distance(done.lse, made.truth_lse)
            grid = (built.max_context_chunk, built.num_chunks)
            known = schedule == "packed" or not case.chunks or grid == (case.step, case.chunks)
            shape = f"{_short(case.context)} / {_short(case.queries)}"
            cells = (case.name, shape, str(case.heads), schedule, done.attention, f"{grid[0]} x {grid[1]}",
                     f"{error:.1e}", f"{lse_error:.1e}", f"{float(made.truth.abs().max()):.2f}")  # fmt: skip
            yield Row(cells, known and error <= GATE and lse_error <= LSE_GATE)


def _attentions(impl: str, device: str) -> tuple[str, ...]:
    if impl == "reference":
        return ("reference",)
    return ("triton", "flashinfer") if device == "cuda" else ("triton",)


def unavailable(attention: str, dtype: torch.dtype, case: Case, device: str) -> str:
    """Why an attention can't serve a case here, or an empty text."""
    try:
        mla.resolve_attention(attention, "triton", dtype, (case.sizes.key, case.sizes.dv), device)
    except BackendError as error:
        return str(error)
    return ""


LOOP_COLUMNS = (
    "case", "cached / new", "heads", "schedule", "attention", "span x chunks", "error", "error of lse",
    "largest output",
)  # fmt: skip


def _short(values: Sequence[int]) -> str:
    return ",".join(map(str, values)) if len(values) < 7 else f"{values[0]} x {len(values)}"


def check_mutations() -> Iterator[Row]:
    """Known bugs, one at a time, in float64: the gate must notice each in some case.

    On the even grid those that do not depend on the order of merges must make the known errors.
    """
    chosen = {c.name: problem(c, dtype=torch.float64) for c in (*LOOP_CASES[:5], MORE_CASES[1])}
    for name, schedule in itertools.product(KNOWN, ("even", "packed")):
        with mutated(name):
            errors = {case: made.error(run(made, schedule).o) for case, made in chosen.items()}
        shown = [f"{errors[c]:.4f} ({k:.4g})" for c, k in zip(CASES, KNOWN[name], strict=True)]
        same = all(abs(errors[c] - k) <= 0.03 * k + 1e-3 for c, k in zip(CASES, KNOWN[name], strict=True))
        comparable = schedule == "even" and name in ORDER_FREE
        ok = max(errors.values()) > GATE and (same or not comparable)
        yield Row((name, schedule, *shown, f"{errors[MORE_CASES[1].name]:.4f}"), ok)


MUTATION_COLUMNS = ("bug", "schedule", *(f"{c} (known)" for c in CASES), MORE_CASES[1].name)


def check_lse_bases(impls: Iterable[str], device: str) -> Section:
    """The start-up check of every attention that is possible here."""
    rows = []
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    names = dict.fromkeys(name for impl in impls for name in _attentions(impl, device))
    for name, dtype in itertools.product(names, dtypes):
        shown, reason = str(dtype).removeprefix("torch."), unavailable(name, dtype, LOOP_CASES[0], device)
        if reason:
            rows.append(Row((name, shown, f"not run: {reason}"), True))
            continue
        factor = mla.check_lse_base(name, dtype=dtype, device=device)
        natural = factor == 1.0 or (name == "flashinfer" and factor == math.log(2.0))
        rows.append(Row((name, shown, f"{factor:.4f}"), natural))
    return Section("Factor to the natural log-sum-exp", ("attention", "dtype", "factor"), tuple(rows))
