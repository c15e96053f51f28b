"""The verifier of flows: oracle, float64 reference and Triton, stage by stage, over a handful of specs.

    report = verify_flow("gqa_quest_sparse_attention")
    print(report)
    report.ok, report.failures

Stages: every field from K and V, scores from q and fields, the selection by the scores it picked, attention's o and
lse, and the state a step leaves. ``reference`` runs in float64, so its tolerances are float64's; ``triton`` runs in
fp32 over the pool's dtype. Fields are stored in their own dtype by both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from flowlib.core.errors import OptionError
from flowlib.core.flow import vFlow, vFlowMLA
from flowlib.core.spec import Spec
from flowlib.runtime.api import build, profile
from flowlib.runtime.plan import IMPLEMENTATIONS, Plan
from flowlib.testing import selection, stages
from flowlib.testing.inputs import scene
from flowlib.testing.oracles import Oracle, has_oracle, oracle_of
from flowlib.testing.own_reference import ReferenceOracle
from flowlib.testing.tolerance import Judgement

STATE_STEPS = 3
"""Steps run of a flow with state."""


@dataclass(frozen=True)
class Case:
    """A spec and the requests it is tried on; ``lengths=None`` means :func:`flowlib.testing.ragged_lengths`."""

    label: str
    spec: Spec
    lengths: tuple[int, ...] | None = None
    q_lens: tuple[int, ...] | None = None


@dataclass(frozen=True)
class StageResult:
    """One stage of one implementation in one case, or the worst over cases."""

    case: str
    impl: str
    stage: str
    error: float
    tolerance: float
    ok: bool
    note: str = ""
    size: float = 0.0
    """The oracle's largest finite value."""

    @property
    def ratio(self) -> float:
        """error / tolerance."""
        return Judgement(self.error, self.tolerance).ratio


@dataclass(frozen=True)
class VerifyReport:
    """What :func:`verify_flow` found.

    Attributes:
        flow: its registered name.
        oracle: ``"independent"``, ``"given"``, or ``"own reference"``.
        impls: the implementations run.
        results: one per case, implementation and stage.
        attended, cached: pages attended of pages cached, over all page lists, by implementation.
        seconds: by implementation.
        notes: what was done differently from what was asked, and why.
    """

    flow: str
    oracle: str
    impls: tuple[str, ...]
    results: tuple[StageResult, ...]
    attended: Mapping[str, int]
    cached: Mapping[str, int]
    seconds: Mapping[str, float]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every stage of every case is within its tolerance, and something was checked."""
        return bool(self.results) and all(r.ok for r in self.results)

    @property
    def failures(self) -> tuple[StageResult, ...]:
        """The results beyond their tolerance."""
        return tuple(r for r in self.results if not r.ok)

    def worst(self) -> dict[tuple[str, str], StageResult]:
        """The result nearest to, or furthest beyond, its tolerance over all cases, by (stage, implementation)."""
        found: dict[tuple[str, str], StageResult] = {}
        for result in self.results:
            key = (result.stage, result.impl)
            if key not in found or (found[key].ok, -found[key].ratio) > (result.ok, -result.ratio):
                found[key] = result
        return found

    def __str__(self) -> str:
        lines = [f"{self.flow}: {'ok' if self.ok else 'FAILED'} (oracle: {self.oracle})"]
        for (stage, impl), r in self.worst().items():
            numbers = f"error {r.error:.2e}  tolerance {r.tolerance:.2e}  {'ok' if r.ok else 'FAILED'}"
            lines.append(f"  {stage:<20} {impl:<10} {numbers}  {r.case}")
        for impl in self.impls:
            kept, total = self.attended[impl], self.cached[impl]
            skipped = f"{total - kept} skipped, {self.seconds[impl]:.1f} s"
            lines.append(f"  {impl}: {kept} of {total} pages attended, {skipped}")
        lines += [f"  {r.impl}, {r.stage}, {r.case}: {r.note}" for r in self.failures]
        return "\n".join([*lines, *(f"  note: {n}" for n in self.notes)])


def default_cases(flow: vFlow, overrides: Mapping[str, object] | None = None) -> list[Case]:
    """The specs a flow is tried on.

    Of a flow over K and V: fp32 and bf16, groups of 1, 3, 4 and 8, four page sizes, head sizes that are no power of
    two, ALiBi, no and several reserved pages, a budget by ratio, several query tokens. Of a flow over MLA latents: 16
    heads of DeepSeek's sizes, and small and odd ones.

    Args:
        flow: gives the page size of the first case.
        overrides: numbers of the spec that hold in every case.
    """
    cases = []
    mla = isinstance(flow, vFlowMLA)
    for numbers, requests in (_tried_mla if mla else _tried)(flow.default_page_size):
        given = {**_SMALL, **numbers, **(overrides or {})}
        if given.pop("alibi", False) and "alibi_slopes" not in given:
            heads = int(given["group_size"]) * int(given["num_kv_heads"])  # type: ignore[call-overload]
            given["alibi_slopes"] = tuple(2.0 ** -(h + 1) for h in range(heads))
        spec = Spec(**given)  # type: ignore[arg-type]
        fits = all(-(-n // spec.page_size) <= spec.max_pages for n in requests.get("lengths", ()))
        cases.append(Case(_label(spec), spec, **(requests if fits else {})))
    return cases


_SMALL = {"num_kv_heads": 2, "max_pages": 40, "max_batch": 16}


def _tried(size: int) -> list[tuple[dict[str, object], dict[str, tuple[int, ...]]]]:
    """Numbers of a spec, and lengths and q_lens where they are not the usual ones; `size` is the flow's page size."""
    fp32, bf16 = {"kv_dtype": torch.float32}, {"kv_dtype": torch.bfloat16}
    several = {"lengths": (7 * size + 1, 2 * size, 9 * size + size // 2), "q_lens": (2, 0, 3)}
    return [
        ({**bf16, "page_size": size, "head_dim": 64, "group_size": 4, "top_k": 3}, {}),
        ({**fp32, "page_size": 5, "head_dim": 80, "v_head_dim": 48, "group_size": 3, "top_k": 2, "bos": 2, "eos": 3,
          "alibi": True}, {}),
        ({**bf16, "page_size": 64, "head_dim": 128, "group_size": 8, "num_kv_heads": 1, "top_k": 1, "top_k_ratio": 0.3,
          "bos": 0}, {"lengths": (129, 577, 0, 321)}),
        ({**fp32, "page_size": 1, "head_dim": 96, "group_size": 1, "num_kv_heads": 3, "top_k": 7}, {}),
        ({**fp32, "page_size": size, "head_dim": 64, "group_size": 4, "top_k": 2, "scale": 0.3}, several),
    ]  # fmt: skip


def _tried_mla(size: int) -> list[tuple[dict[str, object], dict[str, tuple[int, ...]]]]:
    """The same for a flow over MLA latents: 16 heads of DeepSeek's sizes, then small and odd ones."""
    shared = {"num_kv_heads": 1, "scale": 0.2}
    fp32, bf16 = {"kv_dtype": torch.float32, **shared}, {"kv_dtype": torch.bfloat16, **shared}
    several = {"lengths": (7 * size + 1, 2 * size, 9 * size + size // 2), "q_lens": (2, 0, 3)}
    return [
        ({**bf16, "page_size": size, "head_dim": 576, "kv_lora_rank": 512, "group_size": 16, "top_k": 2,
          "scale": 192**-0.5}, {"lengths": (5 * size + 3, 0, 3 * size)}),
        ({**fp32, "page_size": 5, "head_dim": 40, "kv_lora_rank": 24, "group_size": 3, "top_k": 2, "bos": 2, "eos": 3},
         {}),
        ({**bf16, "page_size": 64, "head_dim": 80, "kv_lora_rank": 64, "group_size": 20, "top_k": 1, "top_k_ratio": 0.3,
          "bos": 0}, {"lengths": (129, 577, 0, 321)}),
        ({**fp32, "page_size": 1, "head_dim": 32, "kv_lora_rank": 32, "group_size": 1, "top_k": 7}, {}),
        ({**bf16, "page_size": size, "head_dim": 48, "kv_lora_rank": 32, "group_size": 4, "top_k": 2}, several),
    ]  # fmt: skip


def verify_flow(
    name: str,
    *,
    options: Mapping[str, object] | None = None,
    spec: Mapping[str, object] | None = None,
    impl: Sequence[str] = ("reference", "triton"),
    device: str | torch.device = "cpu",
    oracle: Oracle | None = None,
    module_path: str | Path | None = None,
    cases: Sequence[Case] | None = None,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> VerifyReport:
    """Compares a flow's implementations with an oracle.

    Args:
        name: registered name or alias.
        options: the flow's options.
        spec: numbers of the spec that hold in every case.
        impl: of ``"reference"`` (float64) and ``"triton"`` (interpreted on the CPU).
        device: where they run; oracles run on the CPU.
        oracle: in place of the built-in oracle; a flow that has none is held against its own float64 reference.
        module_path: a ``.py`` file that registers the flow.
        cases: in place of :func:`default_cases`.
        seed: of the inputs.
        progress: called with the label of each case when it is done.

    Raises:
        UnknownFlowError, OptionError, FlowLoadError, FlowDefinitionError, BackendError: nothing was compared.
    """
    for one in impl:
        if one not in IMPLEMENTATIONS:
            raise OptionError(f"verify_flow: impl has {one!r}, expected 'reference' and 'triton'")
    given = dict(options or {})
    flow = build(name, module_path=module_path, **given)
    kind = "given" if oracle else "independent" if has_oracle(name) else "own reference"
    chosen = oracle or (oracle_of(name, **given) if has_oracle(name) else None)
    tally = _Tally(tuple(impl))
    for case in cases if cases is not None else default_cases(flow, spec):
        case, plan = _planned(flow, case, tally.notes)
        tally.run(case, plan, chosen or ReferenceOracle(plan), device, seed)
        if progress is not None:
            progress(case.label)
    return VerifyReport(
        _registered(name), kind, tally.impls, tuple(tally.results), tally.attended, tally.cached, tally.seconds,
        tuple(dict.fromkeys(tally.notes)),
    )  # fmt: skip


@dataclass
class _Tally:
    impls: tuple[str, ...]
    results: list[StageResult] = field(default_factory=list)
    attended: dict[str, int] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for counts in (self.attended, self.cached, self.seconds):
            counts.update(dict.fromkeys(self.impls, 0))

    def run(self, case: Case, plan: Plan, oracle: Oracle, device: str | torch.device, seed: int) -> None:
        """Runs one case in every implementation."""
        made = scene(plan, case.lengths, seed, device, case.q_lens)
        for impl in self.impls:
            start = time.perf_counter()
            store = made.pool_by(impl)
            for i in range(STATE_STEPS if plan.state_fields else 1):
                run = stages.run_step(made, impl, store, made.q.roll(i, 0))
                if i == 0:
                    self._add(case, impl, "field ", stages.judge_fields(run, oracle))
                self._judge(case, run, oracle)
            self.seconds[impl] += time.perf_counter() - start

    def _judge(self, case: Case, run: stages.Run, oracle: Oracle) -> None:
        scores, truths = stages.judge_scores(run, oracle)
        precision, slack = run.compute, 0.0
        if scores.problems:
            self._add(case, run.impl, "", {"scores": (Judgement(float("inf"), 0.0, (), False), scores.problems[0])})
        elif scores.got:
            self._add(case, run.impl, "", {"scores": scores.judge(precision)})
            slack = float(scores.tolerance(precision).max())
        self._add(case, run.impl, "", {"selection": selection.judge_selection(run, oracle, truths, slack)})
        self._add(case, run.impl, "attention ", stages.judge_attention(run))
        self._add(case, run.impl, "state ", stages.judge_state(run, oracle))
        lists = run.out.lengths.cpu().clamp(min=0)
        self.attended[run.impl] += int(lists.sum())
        totals = [-(-seen // case.spec.page_size) for _, seen in run.scene.rows]
        self.cached[run.impl] += sum(totals) * lists.shape[1]

    def _add(self, case: Case, impl: str, prefix: str, verdicts: Mapping[str, tuple[Judgement, str]]) -> None:
        for stage, (verdict, where) in verdicts.items():
            judged = (verdict.error, verdict.tolerance, verdict.ok, where, verdict.size)
            self.results.append(StageResult(case.label, impl, prefix + stage, *judged))


def _planned(flow: vFlow, case: Case, notes: list[str]) -> tuple[Case, Plan]:
    """The case's plan; where the flow refuses the case's page size, its own default page size is taken, and noted."""
    try:
        plan = profile(flow, case.spec)
    except OptionError as error:
        if case.spec.page_size == flow.default_page_size:
            raise
        spec = case.spec.replace(page_size=flow.default_page_size)
        notes.append(f"page size {flow.default_page_size} in place of {case.spec.page_size}: {error}")
        case, plan = Case(_label(spec), spec), profile(flow, spec)
    if plan.state_fields and case.q_lens is not None:
        notes.append(f"one query token per request: state field {plan.state_fields[0]!r} carries from step to step")
        case = Case(case.label, case.spec, case.lengths)
    return case, plan


def _label(spec: Spec) -> str:
    dtype = str(spec.kv_dtype).removeprefix("torch.")
    return f"{dtype}, page {spec.page_size}, group {spec.group_size}, head_dim {spec.head_dim}"


def _registered(name: str) -> str:
    from flowlib.core import registry

    return next((known for known in registry.registered() if name in registry.aliases_of(known)), name)
