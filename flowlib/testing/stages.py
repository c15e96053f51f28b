"""One implementation's step over a scene, held against an oracle stage by stage.

Each stage starts from what the implementation itself made in the stage before (its stored fields, its scores, its page
lists), so an error shows in the stage that made it, and tolerances do not pile up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from flowlib.core.attention import Entmax
from flowlib.core.errors import OptionError
from flowlib.core.spec import Spec
from flowlib.runtime.plan import StepOutput
from flowlib.runtime.pool import PagedPool
from flowlib.testing.inputs import Scene, fill_nan
from flowlib.testing.oracles import ABOUT_ROW, Oracle, attention, tokens_of
from flowlib.testing.tolerance import Judgement, accumulation_step, derive, gamma, judge, upcast

ELEMENTARY = 8
"""Roundings of scale, exp, log and division on the way of one value."""
_UNWRITTEN = -12345


@dataclass(frozen=True)
class Run:
    """What an implementation did.

    Attributes:
        impl: ``"reference"`` (in float64) or ``"triton"``.
        scene: the inputs; `q` the queries of this step.
        before: what the fields stood for when the step read them, by name; float8 summaries times their scale.
        store: the pool after the step.
        out: the step's outputs.
    """

    impl: str
    scene: Scene
    q: torch.Tensor
    before: dict[str, torch.Tensor]
    store: PagedPool
    out: StepOutput

    @property
    def compute(self) -> torch.dtype:
        """What it computes in."""
        return torch.float64 if self.impl == "reference" else torch.float32


@dataclass
class Collected:
    """Values of one stage from all rows, judged together."""

    got: list[torch.Tensor] = field(default_factory=list)
    truth: list[torch.Tensor] = field(default_factory=list)
    low: list[torch.Tensor] = field(default_factory=list)
    step: list[torch.Tensor] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(
        self, label: str, got: torch.Tensor, truth: torch.Tensor, low: torch.Tensor, step: torch.Tensor
    ) -> None:
        """Adds tensors of one shape; `label` says where they are from."""
        for values, x in ((self.got, got), (self.truth, truth), (self.low, low), (self.step, step)):
            values.append(x.detach().cpu().to(torch.float64).expand_as(truth).flatten())
        self.labels.append(label)

    def tolerance(self, dtype: torch.dtype) -> torch.Tensor:
        """Tolerance of each value; see :mod:`flowlib.testing.tolerance`."""
        return derive(torch.cat(self.truth), torch.cat(self.low), dtype=dtype, step=torch.cat(self.step))

    def judge(self, dtype: torch.dtype) -> tuple[Judgement, str]:
        """The worst value's judgement, and where it is."""
        if not self.got:
            return Judgement(0.0, 0.0), ""
        verdict = judge(torch.cat(self.got), torch.cat(self.truth), self.tolerance(dtype))
        flat = verdict.where[0] if verdict.where else 0
        for label, values in zip(self.labels, self.got, strict=True):
            if flat < values.numel():
                return verdict, label
            flat -= values.numel()
        return verdict, ""


def run_step(scene: Scene, impl: str, store: PagedPool, q: torch.Tensor) -> Run:
    """One step; the outputs and buffers of ``"triton"`` hold NaN before it.

    Raises:
        BackendError, BatchError, ShapeError: `impl` can't run here, or the inputs do not fit.
    """
    plan, batch = scene.plan, scene.batch
    before = {name: store.values(name).clone() for name in store.fields}
    if impl == "reference":
        out = plan.step(q, store, batch, impl=impl, dtype=torch.float64)
        return Run(impl, scene, q, before, store, out)
    plan.check_impl(impl, store.device)
    plan.check_step(q, store, batch)
    out = plan.allocate(batch.size, batch.width, store.device)
    for value in (out.o, out.lse, out.tau, out.mass, *(v for n, v in out.workspace.items() if n != "alibi_slopes")):
        if value is not None:
            fill_nan(value)
    out.pages.fill_(_UNWRITTEN)
    out.lengths.fill_(_UNWRITTEN)
    plan.launch(q, store, batch, out)
    return Run(impl, scene, q, before, store, out)


# -- fields


def judge_fields(run: Run, oracle: Oracle) -> dict[str, tuple[Judgement, str]]:
    """Every field of every finished page, by field name.

    Raises:
        OptionError: the oracle leaves a field of the flow out.
    """
    scene, spec = run.scene, run.scene.spec
    k, v, where, labels = _finished(scene)
    verdicts: dict[str, tuple[Judgement, str]] = {}
    for name, declared in scene.plan.fields.items():

        def formula(k: torch.Tensor, v: torch.Tensor, name: str = name) -> torch.Tensor:
            return _field_of(oracle, name, k, v, spec)

        collected = Collected()
        if len(k):
            unit = _scales(run, where[1]) if declared.rounding else torch.ones((), dtype=torch.float64)
            truth = formula(k, v) / unit
            low = (formula(k.float(), v.float()) / unit.float()).to(declared.dtype)
            step = torch.zeros(())
            if declared.dtype is torch.float32:
                terms = spec.page_size + spec.head_dim + ELEMENTARY
                step = accumulation_step(formula, (k, v), terms, independent=True)
            page, head = where
            got = run.before[name].cpu()[page, head].to(torch.float64) / unit
            for i, label in enumerate(labels):
                if _is_broken(declared.rounding, got[i], truth[i]):
                    collected.problems.append(f"{name}, {label}: rounded {declared.rounding}, and no bound")
                collected.add(f"{name}, {label}", got[i], truth[i], low[i], step[i] if step.dim() else step)
        verdicts[name] = collected.judge(declared.dtype)
        if collected.problems:
            verdicts[name] = Judgement(math.inf, 0.0, (), False), collected.problems[0]
    return verdicts


def _scales(run: Run, head: torch.Tensor) -> torch.Tensor:
    """Scales of the float8 summaries of kv heads ``[N]``, float64 ``[N, 1, 1]``; they are judged in units of these."""
    return run.store.scales_of(torch.float64).cpu().flatten()[head][:, None, None]


def _is_broken(rounding: str, got: torch.Tensor, truth: torch.Tensor) -> bool:
    """Whether a value of a float8 bound lies on the wrong side of `truth`, by more than fp32 arithmetic explains."""
    short = {"up": truth - got, "down": got - truth}.get(rounding)
    return short is not None and bool((short > gamma(ELEMENTARY) * truth.abs()).any())


def _field_of(oracle: Oracle, name: str, k: torch.Tensor, v: torch.Tensor, spec: Spec) -> torch.Tensor:
    fields = oracle.fields(k, v, spec)
    if name not in fields:
        raise OptionError(f"{type(oracle).__name__}.fields gives {sorted(fields)}, expected {name!r} of the flow too")
    return fields[name]


def _finished(
    scene: Scene,
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor], list[str]]:
    """K ``[N, page_size, D]`` and V of every finished (page, kv head), their physical page and head, and labels."""
    size, keys, values, page, head, labels = scene.spec.page_size, [], [], [], [], []
    for b, length in enumerate(scene.lengths):
        for j in range(length // size):
            for h in range(scene.spec.num_kv_heads):
                keys.append(scene.k[b][j * size : (j + 1) * size, h])
                values.append(scene.v[b][j * size : (j + 1) * size, h])
                page.append(scene.pages[b][j])
                head.append(h)
                labels.append(f"request {b}, page {j}, kv head {h}")
    where = (torch.tensor(page, dtype=torch.int64), torch.tensor(head, dtype=torch.int64))
    if not keys:
        return torch.zeros(0), torch.zeros(0), where, labels
    k, v = upcast(torch.stack(keys), torch.stack(values))
    return k * scene.spec.k_scale, v * scene.spec.v_scale, where, labels


# -- scores


@dataclass(frozen=True)
class Row:
    """One kv head of one query token: what an oracle sees, in float64."""

    index: int
    head: int
    seen: int
    num_pages: int
    q: torch.Tensor
    pages: dict[str, torch.Tensor]

    @property
    def label(self) -> str:
        """For messages."""
        return f"row {self.index} ({self.seen} tokens), kv head {self.head}"


def rows_of(run: Run) -> Iterator[Row]:
    """Every row with its scored pages, which may be none."""
    scene, spec = run.scene, run.scene.spec
    fields = {name: value.cpu() for name, value in run.before.items()}
    q = run.q.cpu().to(torch.float64).view(len(scene.rows), spec.num_kv_heads, spec.group_size, spec.head_dim)
    size = spec.page_size
    for i, (b, seen) in enumerate(scene.rows):
        num_pages = -(-seen // size)
        first, last = spec.bos, max(spec.bos, num_pages - spec.eos)
        physical = torch.tensor(scene.pages[b][first:last], dtype=torch.int64)
        tokens = slice(first * size, last * size)
        for h in range(spec.num_kv_heads):
            k, v = upcast(scene.k[b][tokens, h], scene.v[b][tokens, h])
            pages = {
                "k": (k * spec.k_scale).view(len(physical), size, spec.head_dim),
                "v": (v * spec.v_scale).view(len(physical), size, spec.dv),
                **about_row(scene, i, h, q[i, h]),
                "position": torch.arange(first, last, dtype=torch.float64).view(-1, 1, 1),
                **{name: value[physical, h].to(torch.float64) for name, value in fields.items()},
            }
            yield Row(i, h, seen, num_pages, q[i, h], pages)


def about_row(scene: Scene, row: int, head: int, q: torch.Tensor) -> dict[str, torch.Tensor]:
    """Query position, ALiBi slopes and the largest score in the last page, by its tokens; -inf for an empty row."""
    spec, (request, seen) = scene.spec, scene.rows[row]
    group = slice(head * spec.group_size, (head + 1) * spec.group_size)
    given = [0.0] * spec.group_size if spec.alibi_slopes is None else spec.alibi_slopes[group]
    slopes, at = torch.tensor(given, dtype=torch.float64), torch.tensor([seen - 1], dtype=torch.float64)
    top = torch.full((spec.group_size,), -math.inf, dtype=torch.float64)
    for token in range((seen - 1) // spec.page_size * spec.page_size if seen else 0, seen):
        key = scene.k[request][token, head].to(torch.float64) * spec.k_scale
        top = torch.maximum(top, q @ key * spec.softmax_scale + slopes * (token - (seen - 1)))
    return {"query_position": at, "alibi_slopes": slopes, "tail_maximum": top}


def _formula_of(
    row: Row, what: Callable[[torch.Tensor, dict[str, torch.Tensor]], torch.Tensor]
) -> tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]:
    """`what` of q and pages as a function of tensors, and these in float64: what is about the row is no input."""
    names = [n for n in row.pages if n not in ABOUT_ROW]

    def formula(q: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        about = {n: x.to(q.dtype) for n, x in row.pages.items() if n in ABOUT_ROW}
        return what(q, {**dict(zip(names, values, strict=True)), **about})

    return formula, (row.q, *(row.pages[n] for n in names))


def judge_scores(run: Run, oracle: Oracle) -> tuple[Collected, dict[tuple[int, int], torch.Tensor]]:
    """Scores of every row, and the oracle's scores ``[lanes, n]`` by (row, kv head)."""
    spec, scores = run.scene.spec, run.out.scores
    collected, truths = Collected(), {}
    for row in rows_of(run):
        formula, inputs = _formula_of(row, lambda q, pages: oracle.scores(q, pages, spec))  # type: ignore[arg-type,return-value]
        n = len(row.pages["position"])
        if run.scene.plan.in_full(torch.tensor(row.seen)):
            continue
        truth = formula(*inputs) if n else None
        if truth is None:
            continue
        if scores is None:
            collected.problems.append(f"{row.label}: not scored, the oracle scores {n} pages")
            continue
        lanes = slice(row.head * len(truth), (row.head + 1) * len(truth))
        got = scores[row.index, lanes, spec.bos : spec.bos + n]
        if got.shape != truth.shape:
            collected.problems.append(f"{row.label}: scores {list(got.shape)}, the oracle gives {list(truth.shape)}")
            continue
        low = truth if run.compute is torch.float64 else formula(*(x.float() for x in inputs))
        terms = spec.head_dim + spec.group_size + n + ELEMENTARY
        step = accumulation_step(formula, inputs, terms, run.compute)
        cut = _cut(oracle, spec, truth, got.cpu(), float(step.max()))
        collected.add(row.label, got, truth.masked_fill(cut, -math.inf), low.masked_fill(cut, -math.inf), step)
        truths[row.index, row.head] = truth
    return collected, truths


def _cut(oracle: Oracle, spec: Spec, truth: torch.Tensor, got: torch.Tensor, slack: float) -> torch.Tensor:
    """Scores ``[lanes, n]`` that must be -inf: those surely not kept, and those that may be either and are -inf."""
    masks = [oracle.kept(lane, spec, slack) for lane in truth]
    surely, perhaps = torch.stack([m[0] for m in masks]), torch.stack([m[1] for m in masks])
    return ~perhaps | (~surely & (got == -math.inf))


# -- attention and state


def judge_attention(run: Run) -> dict[str, tuple[Judgement, str]]:
    """o and lse over the implementation's own page lists; for entmax, see :mod:`flowlib.testing.entmax_stage`."""
    scene, spec, out = run.scene, run.scene.spec, run.out
    if isinstance(out.plan.attention, Entmax):
        from flowlib.testing.entmax_stage import judge_entmax

        return judge_entmax(run, out.plan.attention)
    if out.lse is None:
        raise OptionError("judge_attention: the step gave no lse")
    lists = out.pages.shape[1]
    per_list, lanes = spec.num_heads // lists, lists // spec.num_kv_heads
    coarse = None if spec.field_dtype is torch.float32 else spec.field_dtype
    o_dtype = torch.float64 if run.impl == "reference" else spec.field_dtype
    found = {"o": Collected(), "lse": Collected()}
    for i, (b, seen) in enumerate(scene.rows):
        for lane in range(lists):
            listed = [p for p in out.pages[i, lane].tolist() if 0 <= p < -(-seen // spec.page_size)]
            positions = tokens_of(listed, seen, spec.page_size)
            heads = slice(lane * per_list, (lane + 1) * per_list)
            slopes = None if spec.alibi_slopes is None else spec.alibi_slopes[heads]
            k, v = upcast(scene.k[b][positions, lane // lanes], scene.v[b][positions, lane // lanes])
            inputs = (run.q[i, heads].cpu().to(torch.float64), k * spec.k_scale, v * spec.v_scale)
            truth = attention(*inputs, positions, seen - 1, spec, slopes)
            low = truth
            if run.compute is torch.float32:
                low = attention(*(x.float() for x in inputs), positions, seen - 1, spec, slopes, coarse)
            logit = gamma(spec.head_dim + 3, run.compute) * truth.logit
            total = gamma(len(positions) + ELEMENTARY, run.compute)
            label = f"row {i} ({seen} tokens), list {lane}"
            found["o"].add(
                label, out.o[i, heads], truth.o, low.o.to(o_dtype), (2 * logit + total)[:, None] * truth.mass
            )
            found["lse"].add(label, out.lse[i, heads], truth.lse, low.lse, logit + total)
    return {"o": found["o"].judge(o_dtype), "lse": found["lse"].judge(run.compute)}


def judge_state(run: Run, oracle: Oracle) -> dict[str, tuple[Judgement, str]]:
    """State fields after the step, by name: the scored pages' against the oracle, all others unchanged."""
    plan, spec = run.scene.plan, run.scene.spec
    found = {name: Collected() for name in plan.state_fields}
    untouched = {name: torch.ones(run.store.fields[name].shape[:2], dtype=torch.bool) for name in found}
    for row in rows_of(run) if found else ():
        n = len(row.pages["position"])
        own = run.scene.pages[run.scene.rows[row.index][0]][spec.bos : spec.bos + n]
        physical = torch.tensor(own, dtype=torch.int64)
        for name, collected in found.items():
            untouched[name][physical, row.head] = False
            if n:
                got = run.store.fields[name].cpu()[physical, row.head]
                expected = _new_state(oracle, name, row, spec, plan.fields[name].dtype)
                collected.add(f"{name}, {row.label}", got, *expected)
    verdicts = {name: collected.judge(plan.fields[name].dtype) for name, collected in found.items()}
    for name, mask in untouched.items():
        before, after = run.before[name].cpu()[mask], run.store.fields[name].cpu()[mask]
        if not torch.equal(before.float().nan_to_num(0.5), after.float().nan_to_num(0.5)):
            verdicts[name] = Judgement(math.inf, 0.0, (), False), "a page that was not scored changed"
    return verdicts


def _new_state(
    oracle: Oracle, name: str, row: Row, spec: Spec, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """float64 state ``[n, r, c]``, its low-precision evaluation and the accumulation step, all in fp32 arithmetic."""
    formula, inputs = _formula_of(row, lambda q, pages: oracle.state(q, pages, spec)[name])
    truth, low = formula(*inputs), formula(*(x.float() for x in inputs)).to(dtype)
    terms = spec.head_dim + spec.group_size + len(truth) + ELEMENTARY
    return truth, low, accumulation_step(formula, inputs, terms)
