"""The gate before any speed: every stage of a step at full size, sampled rows held against a float64 reference.

Each stage starts from what the kernels made in the stage before, so an error shows where it was made. Fields and scores
are held against the flow's oracle or its own graph in float64, attention against an independently written formula,
selections by the scores they picked; tolerances are derived as in ``flowlib.testing.tolerance``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from bench_pools import Problem
from bench_shapes import FlowChoice

import flowlib
from flowlib.compiler.program import SegmentStage
from flowlib.core.formats import FORMAT
from flowlib.runtime.plan import Plan, StepOutput
from flowlib.testing import Judgement, Oracle, ReferenceOracle, Scene, fill_nan, has_oracle, oracle_of
from flowlib.testing.selection import judge_selection
from flowlib.testing.stages import ELEMENTARY, Run, about_row, judge_attention
from flowlib.testing.tolerance import condition, derive, gamma, judge

PEER_ERROR = 2e-2
"""Largest relative error (2-norm) of another library's bf16 attention: its weights are rounded to bf16."""
SAMPLED_PAGES = 256
SAMPLED_SCORES = 8
CONDITION_SLACK = 2
"""The scores of a row are taken to be at most this many times as sensitive as the sampled ones."""
_UNWRITTEN = -12345


@dataclass(frozen=True)
class Verdict:
    """One stage of one sampled row; `row` says which."""

    flow: str
    shape: str
    stage: str
    row: str
    error: float
    tolerance: float
    ok: bool
    note: str = ""


@dataclass(frozen=True)
class Step:
    """A step as the kernels left it: outputs, the fields it read (as they were before), the pool."""

    plan: flowlib.Plan
    problem: Problem
    store: flowlib.KVStore
    before: dict[str, torch.Tensor]
    out: StepOutput


def run_step(plan: flowlib.Plan, problem: Problem, store: flowlib.KVStore) -> Step:
    """Fields, planning and one step by the kernels, into memory that held nothing like a result before."""
    for field in store.fields.values():
        fill_nan(field)
    size = plan.spec.page_size
    full = torch.div(problem.batch.seq_lens.to(torch.int64), size, rounding_mode="floor")
    finished = torch.arange(problem.table.shape[1], device=full.device) < full[:, None]
    plan.update(store, problem.table[finished].to(torch.int64) * size + size - 1, impl="triton")
    problem.batch.page_table.fill_(-7)
    problem.plan_step()
    out = plan.allocate(problem.batch.size, problem.batch.width, store.device)
    for name, value in {"o": out.o, "lse": out.lse, **out.workspace}.items():
        if name != "alibi_slopes" and value.is_floating_point():  # counters between kernels start as allocated
            fill_nan(value)
    out.pages.fill_(_UNWRITTEN)
    out.lengths.fill_(_UNWRITTEN)
    before = {name: store.fields[name].clone() for name in plan.state_fields}
    plan.launch(problem.q, store, problem.batch, out)
    return Step(plan, problem, store, {**store.fields, **before}, out)


def gate(choice: FlowChoice, step: Step) -> list[Verdict]:
    """The verdicts on a step: planning, then every stage of the sampled rows."""
    label = step.problem.workload.label
    found = [Verdict(choice.label, label, "plan", "all", *_judge_table(step.problem))]
    for request, head in sampled_rows(step.problem):
        row = _Row(choice, step, request, head)
        for stage, (verdict, note) in row.judge().items():
            judged = (verdict.error, verdict.tolerance, verdict.ok, note)
            found.append(Verdict(choice.label, label, stage, f"request {request}, kv head {head}", *judged))
    return found


def crashed(choice: FlowChoice, shape: str, error: BaseException) -> Verdict:
    """The verdict on a step that raised."""
    text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return Verdict(choice.label, shape, "run", "all", math.inf, 0.0, False, text)


def sampled_rows(problem: Problem) -> list[tuple[int, int]]:
    """(request, kv head): the shortest request's first head and the longest one's last head."""
    lengths, heads = problem.workload.lengths, problem.workload.numbers.num_kv_heads
    longest = len(lengths) - 1 - lengths[::-1].index(max(lengths))
    return list(dict.fromkeys([(lengths.index(min(lengths)), 0), (longest, heads - 1)]))


@dataclass(frozen=True)
class DenseTruth:
    """Exact attention of the sampled rows in float64, to hold other libraries against.

    Attributes:
        rows: (request, query heads, o ``[G, Dv]``).
    """

    rows: tuple[tuple[int, slice, torch.Tensor], ...]

    @classmethod
    def of(cls, problem: Problem, store: flowlib.KVStore) -> DenseTruth:
        """The truth for a pool, computed where it lies."""
        spec, rows = store.plan.spec, []
        for request, head in sampled_rows(problem):
            k, v, q = (x.double() for x in _tokens(store, problem, request, head))
            weights = (spec.softmax_scale * q @ k.T).softmax(-1)
            rows.append((request, slice(head * spec.group_size, (head + 1) * spec.group_size), weights @ v))
        return cls(tuple(rows))

    def error(self, o: torch.Tensor) -> float:
        """Largest relative error (2-norm) of o ``[bs, H_q, Dv]`` over the rows; NaN counts as infinite."""
        errors = [float((o[b, heads].double() - truth).norm() / truth.norm()) for b, heads, truth in self.rows]
        return max(math.inf if math.isnan(e) else e for e in errors)


def _judge_table(problem: Problem) -> tuple[float, float, bool, str]:
    owned = torch.arange(problem.table.shape[1]) < torch.tensor(problem.workload.pages)[:, None]
    wrong = int((problem.batch.page_table.cpu()[owned] != problem.table.cpu()[owned]).sum())
    return float(wrong), 0.0, wrong == 0, f"{wrong} wrong page table entries" if wrong else ""


def _tokens(
    store: flowlib.KVStore, problem: Problem, request: int, head: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """K ``[T, D]``, V ``[T, Dv]`` and q ``[G, D]`` of one row, as stored."""
    numbers, length = problem.workload.numbers, problem.workload.lengths[request]
    own = problem.table[request, : problem.workload.pages[request]].to(torch.int64)
    slots = (own[:, None] * numbers.page_size + torch.arange(numbers.page_size, device=own.device)).flatten()[:length]
    group = slice(head * numbers.group_size, (head + 1) * numbers.group_size)
    return store.k[slots, head], store.v[slots, head], problem.q[request, group]


class _Row:
    """One kv head of one request, on the CPU."""

    def __init__(self, choice: FlowChoice, step: Step, request: int, head: int) -> None:
        self.step, self.request, self.head = step, request, head
        plan, problem = step.plan, step.problem
        self.k, self.v, self.q = (x.cpu() for x in _tokens(step.store, problem, request, head))
        self.pages = problem.table[request, : problem.workload.pages[request]].to(torch.int64)
        self.spec = plan.spec.replace(num_kv_heads=1)
        self.plan = Plan(plan.program, self.spec)
        own = ReferenceOracle(self.plan)
        self.fields_oracle: Oracle = oracle_of(choice.name, **choice.options) if has_oracle(choice.name) else own
        cuts = type(self.fields_oracle).kept is not Oracle.kept
        self.oracle: Oracle = self.fields_oracle if cuts else own
        # a score depends on its own page alone
        self.local = not any(isinstance(stage, SegmentStage) for stage in plan.program.step_stages)
        self.sums_pages = not self.local and not cuts
        self.first, self.last = self.spec.bos, max(self.spec.bos, len(self.pages) - self.spec.eos)

    def judge(self) -> dict[str, tuple[Judgement, str]]:
        """Every stage by its name."""
        verdicts = {f"field {name}": (self._judge_field(name), "") for name in self.plan.fields}
        run, truths, slack = self._run(), {}, 0.0
        scored = not self.plan.in_full(torch.tensor(len(self.k)))
        if scored and self.last > self.first and self.step.out.raw_scores is not None:
            verdicts["scores"], truth, slack = self._judge_scores(run)
            truths = {(0, 0): truth}
        verdicts["selection"] = judge_selection(run, self.oracle, truths, slack)
        verdicts |= {f"attention {name}": verdict for name, verdict in judge_attention(run).items()}
        if self.last > self.first:
            verdicts |= {f"state {name}": (self._judge_state(name), "") for name in self.plan.state_fields}
        return verdicts

    def _run(self) -> Run:
        """The row as a batch of its own, for the stages that ``flowlib.testing`` judges."""
        out, spec, lanes = self.step.out, self.spec, self.plan.lanes
        heads = slice(self.head * spec.group_size, (self.head + 1) * spec.group_size)
        lists = slice(self.head * lanes, (self.head + 1) * lanes)
        length = torch.tensor([len(self.k)], dtype=torch.int32)
        width, row = len(self.pages), self.request * self.step.plan.spec.num_kv_heads + self.head
        raw = None if out.raw_scores is None else out.raw_scores[row : row + 1, :, :width].cpu()
        one = slice(self.request, self.request + 1)
        lse = None if out.lse is None else out.lse[one, heads].cpu()
        part = StepOutput(
            self.plan, out.o[one, heads].cpu(), lse, out.pages[one, lists].cpu(),
            out.lengths[one, lists].cpu(), raw, length,
        )  # fmt: skip
        batch = flowlib.Batch(self.pages[None].cpu().to(torch.int32), length)
        scene = Scene(
            self.plan, self.step.store, batch, self.q[None], (len(self.k),), (tuple(self.pages.tolist()),),  # type: ignore[arg-type]
            (self.k[:, None],), (self.v[:, None],), ((0, len(self.k)),),
        )  # fmt: skip
        return Run("triton", scene, self.q[None], {}, self.step.store, part)  # type: ignore[arg-type]

    def _judge_field(self, name: str) -> Judgement:
        """A field of finished pages, evenly spaced ones where there are many."""
        spec, declared = self.spec, self.plan.fields[name]
        count = len(self.k) // spec.page_size
        if not count:
            return Judgement(0.0, 0.0)
        chosen = torch.linspace(0, count - 1, min(count, SAMPLED_PAGES)).round().to(torch.int64)
        k, v = (x[: count * spec.page_size].unflatten(0, (count, -1))[chosen].double() for x in (self.k, self.v))

        def formula(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return self.fields_oracle.fields(k, v, spec)[name]

        truth, low = formula(k, v), formula(k.float(), v.float()).to(declared.dtype)
        step = gamma(spec.page_size + spec.head_dim + ELEMENTARY) * truth.abs()
        got = self._entries(name, self.step.before)[chosen]
        return judge(got, truth, derive(truth, low, dtype=declared.dtype, step=step))

    def _entries(self, name: str, fields: dict[str, torch.Tensor]) -> torch.Tensor:
        """A field of the row's pages, ``[S, r, c]``."""
        return fields[name][self.pages, self.head].cpu()

    def _row_formula(
        self, evaluate: Callable[[torch.Tensor, dict[str, torch.Tensor]], torch.Tensor], last: int
    ) -> tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]:
        """A function of q and the values that the indexer reads of the scored pages before `last`; these in float64."""
        spec, part = self.spec, slice(self.first, last)
        names = [n.name for n in self.plan.program.traced.indexer.leaves() if n.format is FORMAT.PAGED]
        values = []
        for name in names:
            if name in self.plan.fields:
                values.append(self._entries(name, self.step.before)[part].double())
            else:
                tokens = (self.v if name == "v" else self.k)[self.first * spec.page_size : last * spec.page_size]
                values.append(tokens.unflatten(0, (-1, spec.page_size)).double())
        position = torch.arange(self.first, last, dtype=torch.float64).view(-1, 1, 1)
        row = about_row(self._run().scene, 0, 0, self.q.double())

        def formula(q: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
            about = {name: x.to(q.dtype) for name, x in {**row, "position": position}.items()}
            return evaluate(q, {**dict(zip(names, given, strict=True)), **about})

        return formula, (self.q.double(), *values)

    def _terms(self) -> int:
        """Roundings on the way of one score; sums over pages count where they are part of its value."""
        count = self.spec.head_dim + self.spec.group_size + ELEMENTARY
        return count + (self.last - self.first if self.sums_pages else 0)

    def _judge_scores(self, run: Run) -> tuple[tuple[Judgement, str], torch.Tensor, float]:
        """The row's scores, the true ones ``[lanes, n]``, and how far off a score may be."""

        def evaluate(q: torch.Tensor, pages: dict[str, torch.Tensor]) -> torch.Tensor:
            scores = self.oracle.scores(q, pages, self.spec)
            return q.new_zeros(0) if scores is None else scores

        formula, inputs = self._row_formula(evaluate, self.last)
        truth, low = formula(*inputs), formula(*(x.float() for x in inputs))
        got = run.out.scores[0, :, self.first : self.last]  # type: ignore[index]
        if truth.shape != got.shape:
            return (Judgement(math.inf, 0.0, (), False), f"{list(got.shape)}, not {list(truth.shape)}"), truth, 0.0
        finite = torch.isfinite(truth)
        few = min(self.last, self.first + SAMPLED_SCORES) if self.local else self.last
        moved = CONDITION_SLACK * self._sensitivity(*self._row_formula(evaluate, few))
        size = torch.where(finite, truth, 0.0).abs()
        tolerance = derive(truth, low, dtype=torch.float32, step=gamma(self._terms()) * (moved + size))
        slack = float(tolerance.max())
        masks = [self.oracle.kept(lane, self.spec, slack) for lane in truth]
        surely, perhaps = torch.stack([m[0] for m in masks]), torch.stack([m[1] for m in masks])
        cut = ~perhaps | (~surely & (got == -math.inf))
        return (judge(got, truth.masked_fill(cut, -math.inf), tolerance), ""), truth, slack

    def _sensitivity(self, formula: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor]) -> float:
        """Σ|x · ∂score/∂x|, the largest of the row's first scores, where scores depend on other pages of two."""
        count = SAMPLED_SCORES if self.local else 2
        return float(condition(lambda *xs: formula(*xs)[..., :count], inputs).max())

    def _judge_state(self, name: str) -> Judgement:
        """A state field of the scored pages after the step."""
        dtype = self.plan.fields[name].dtype
        own = ReferenceOracle(self.plan)
        formula, inputs = self._row_formula(lambda q, pages: own.state(q, pages, self.spec)[name], self.last)
        truth, low = formula(*inputs), formula(*(x.float() for x in inputs)).to(dtype)
        step = gamma(self._terms()) * truth.abs()
        got = self._entries(name, self.step.store.fields)[self.first : self.last]
        return judge(got, truth, derive(truth, low, dtype=dtype, step=step))


def failures(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The red ones."""
    return [v for v in verdicts if not v.ok]


def worst(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Of each flow and stage the verdict nearest to, or furthest beyond, its tolerance; a green one counts the rows."""
    found: dict[tuple[str, str], list[Verdict]] = {}
    for verdict in verdicts:
        found.setdefault((verdict.flow, verdict.stage), []).append(verdict)
    chosen = []
    for group in found.values():
        bad = max(group, key=lambda v: (not v.ok, Judgement(v.error, v.tolerance).ratio))
        chosen.append(replace(bad, note=f"all {len(group)} rows green") if bad.ok else bad)
    return chosen
