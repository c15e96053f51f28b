"""Does every flow stay right while requests grow, and how much of attention does it keep?

Each flow decodes a few steps over a paged pool, token after token: its fields, scores, selection (by the scores it
picked), attention and state are held against float64 oracles at every step, and beside them stands what sparsity cost:
pages attended, attention mass kept, distance to dense attention. Exit status 1 if a flow is wrong.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated

import torch
import typer
from h2o_cli import Device, Impl, console, finish, prepare, refusals, table, verdict
from rich.progress import Progress

import flowlib
from flowlib.core import registry
from flowlib.errors import OptionError
from flowlib.testing import Judgement, Oracle, ReferenceOracle, Scene, fill_nan, has_oracle, oracle_of, scene, stages
from flowlib.testing.selection import judge_selection

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Setup:
    """What flows are run with.

    Attributes:
        sizes: numbers of the spec; the page size is the flow's own where 0.
        pages: pages of the longest request; others have a half, a quarter and a single page.
        steps: decode steps; the longest request finishes a page among them.
        seed: of the data.
        device, impls: where and by what they are computed.
    """

    sizes: Mapping[str, object] = field(default_factory=dict)
    pages: int = 24
    steps: int = 4
    seed: int = 0
    device: str = "cpu"
    impls: tuple[str, ...] = ("reference", "triton")


@dataclass(frozen=True)
class Step:
    """One step of one implementation.

    Attributes:
        tokens: of the longest request.
        verdicts: by stage.
        attended, cached: pages over all lists.
        mass: share of dense attention's mass kept ``[rows, H_kv]``, the mean over a kv head's query heads.
        distance: |o - dense| / |dense| over the whole output.
    """

    impl: str
    number: int
    tokens: int
    verdicts: dict[str, Judgement]
    attended: int
    cached: int
    mass: torch.Tensor
    distance: float

    @property
    def ok(self) -> bool:
        """Whether every stage is within its tolerance."""
        return all(v.ok for v in self.verdicts.values())


def plan_for(name: str, setup: Setup) -> flowlib.Plan:
    """The flow's plan; its own page size where none is given."""
    flow = flowlib.build(name)
    sizes = {**setup.sizes, "page_size": setup.sizes.get("page_size") or flow.default_page_size}
    return flowlib.profile(flow, flowlib.Spec(max_pages=setup.pages + setup.steps + 1, **sizes))


def lengths_of(plan: flowlib.Plan, setup: Setup) -> list[int]:
    """Tokens before the first step; the longest request finishes its last page half-way."""
    size, half = plan.spec.page_size, setup.steps // 2
    return [max(1, pages * size - half) for pages in (setup.pages, setup.pages // 2, setup.pages // 4, 1)]


def grown(whole: Scene, lengths: list[int], step: int) -> Scene:
    """The scene whose requests have `lengths` tokens: the first ones of `whole`, with queries of their own."""
    size, device = whole.spec.page_size, whole.pool.device
    pages = tuple(own[: -(-n // size)] for own, n in zip(whole.pages, lengths, strict=True))
    table = torch.full_like(whole.batch.page_table, -7)
    for row, own in enumerate(pages):
        table[row, : len(own)] = torch.tensor(own, dtype=torch.int32)
    batch = flowlib.Batch(table, torch.tensor(lengths, dtype=torch.int32, device=device))
    return dataclasses.replace(
        whole, batch=batch, q=whole.q.roll(step, 0) * (1 + step), lengths=tuple(lengths), pages=pages,
        k=tuple(k[:n] for k, n in zip(whole.k, lengths, strict=True)),
        v=tuple(v[:n] for v, n in zip(whole.v, lengths, strict=True)), rows=tuple(enumerate(lengths)),
    )  # fmt: skip


def write(made: Scene, store: flowlib.PagedPool, first: list[int], impl: str) -> None:
    """Stores the tokens of each request from position `first` on, then runs ``forward_cache`` once for all of them."""
    size, slots = made.spec.page_size, []
    for request, own in enumerate(made.pages):
        positions = range(first[request], made.lengths[request])
        loc = torch.tensor([own[t // size] * size + t % size for t in positions], dtype=torch.int64)
        store.k[loc] = made.k[request][first[request] :].to(store.device)
        store.v[loc] = made.v[request][first[request] :].to(store.device)
        slots.append(loc)
    made.plan.update(store, torch.cat(slots).to(store.device), impl=impl)


def judged(run: stages.Run, oracle: Oracle, first: bool) -> dict[str, Judgement]:
    """Every stage of a step against the oracle; what state fields start from is in the `first` step only."""
    fields = run.scene.plan.fields
    found = stages.judge_fields(run, oracle).items()
    verdicts = {f"field {name}": v for name, (v, _) in found if first or fields[name].kind == "summary"}
    scores, truths = stages.judge_scores(run, oracle)
    slack = 0.0
    if scores.problems:
        verdicts["scores"] = Judgement(float("inf"), 0.0, (), False)
    elif scores.got:
        verdicts["scores"] = scores.judge(run.compute)[0]
        slack = float(scores.tolerance(run.compute).max())
    verdicts["selection"] = judge_selection(run, oracle, truths, slack)[0]
    verdicts |= {name: v for name, (v, _) in stages.judge_attention(run).items()}
    return verdicts | {f"state {name}": v for name, (v, _) in stages.judge_state(run, oracle).items()}


def decode(name: str, setup: Setup, oracle: Oracle | None = None) -> Iterator[Step]:
    """Runs a flow by every implementation; yields each step with its judgement.

    Raises:
        FlowlibError: the flow or the setup is refused.
    """
    if setup.steps < 1 or setup.pages < 1:
        raise OptionError(f"verify_flows: steps is {setup.steps}, pages {setup.pages}, expected at least 1 each")
    plan = plan_for(name, setup)
    chosen = oracle or (oracle_of(name) if has_oracle(name) else ReferenceOracle(plan))
    start = lengths_of(plan, setup)
    whole = scene(plan, [n + setup.steps for n in start], setup.seed, setup.device)
    for impl in setup.impls:
        store = flowlib.PagedPool(plan, whole.pool.num_pages, setup.device)
        for value in (store.k, store.v, *store.fields.values()):
            fill_nan(value)
        write(grown(whole, start, 0), store, [0] * len(start), impl)
        for number in range(1, setup.steps + 1):
            made = grown(whole, [n + number for n in start], number)
            write(made, store, [n + number - 1 for n in start], impl)
            run = stages.run_step(made, impl, store, made.q)
            yield _step(run, number, judged(run, chosen, number == 1))


def _step(run: stages.Run, number: int, verdicts: dict[str, Judgement]) -> Step:
    made, spec = run.scene, run.scene.spec
    dense = flowlib.dense(made.q, run.store, made.batch, dtype=torch.float64, attention=made.plan.attention)
    lists = run.out.lengths.cpu()
    if run.out.lse is None or dense.lse is None:  # entmax tells of no share: what it keeps is scaled up to 1
        mass = torch.full(lists.shape, float("nan"), dtype=torch.float64)
    else:
        mass = (run.out.lse.double() - dense.lse).exp().clamp(max=1.0).cpu()
    distance = (run.out.o.double() - dense.o).norm() / dense.o.norm()
    return Step(
        run.impl, number, max(made.lengths), verdicts, int(lists.sum()),
        sum(-(-n // spec.page_size) for n in made.lengths) * lists.shape[1],
        mass.view(len(mass), spec.num_kv_heads, -1).mean(-1), float(distance),
    )  # fmt: skip


def show(name: str, kind: str, steps: list[Step]) -> bool:
    """Prints a flow's table and its verdict."""
    rows = []
    for s in steps:
        worst = max(s.verdicts.values(), key=lambda v: (not v.ok, v.ratio))
        label = next(stage for stage, v in s.verdicts.items() if v is worst)
        rows.append([
            s.impl, str(s.number), str(s.tokens), f"{s.attended} / {s.cached}", _share(float(s.mass.mean())),
            _share(float(s.mass.min())), f"{s.distance:.3f}", _error(s, "scores"), _error(s, "selection"),
            _error(s, "o"), f"{label} {worst.ratio:.2g}",
        ])  # fmt: skip
    columns = [
        "impl", "step", "tokens", "pages attended", "mass kept", "least, kv head", "to dense", "scores", "selection",
        "output", "worst / tolerance",
    ]  # fmt: skip
    table(f"{name} (oracle: {kind})", columns, rows)
    wrong = [(s, stage) for s in steps for stage, v in s.verdicts.items() if not v.ok]
    first = f"first: {wrong[0][1]} by {wrong[0][0].impl} in step {wrong[0][0].number}" if wrong else "all stages"
    verdict(name, not wrong, first)
    return not wrong


def _error(step: Step, stage: str) -> str:
    return f"{step.verdicts[stage].error:.0e}" if stage in step.verdicts else "-"


def _share(mass: float) -> str:
    return f"{mass:.1%}" if mass == mass else "-"


def names_of(flows: list[str] | None, flow_file: str | None) -> list[str]:
    """The flows asked for: those named, those of the file, or every registered one over K and V."""
    built_in = flowlib.list_flows()
    if flow_file is not None:
        registry.load_file(flow_file)
    known = flowlib.list_flows(mla=False) if flow_file is None else registry.registered()
    names = list(flows or ()) or [n for n in known if flow_file is None or n not in built_in]
    for name in names:
        registry.find(name)
    if not names:
        raise OptionError(f"verify_flows: {flow_file} registers no flow that is not built in")
    return names


def verify(names: list[str], setup: Setup, advance: Callable[[str], None]) -> bool:
    """Runs and shows flows; whether all are right."""
    good = []
    for name in names:
        steps = []
        for step in decode(name, setup):
            steps.append(step)
            advance(name)
        good.append(show(name, "independent" if has_oracle(name) else "own reference", steps))
    console.print(f"{sum(good)} of {len(good)} flows are right")
    return all(good)


def main(
    flow: Annotated[list[str] | None, typer.Option(help="A flow's name; may be repeated. All where not given.")] = None,
    flow_file: Annotated[str | None, typer.Option(help="A .py file that registers flows; its flows alone.")] = None,
    steps: Annotated[int, typer.Option(help="Decode steps.", min=1)] = 4,
    pages: Annotated[int, typer.Option(help="Pages of the longest request.", min=1)] = 24,
    page_size: Annotated[int, typer.Option(help="Tokens per page; 0 takes the flow's own.", min=0)] = 0,
    head_dim: Annotated[int, typer.Option(help="Size of a key.", min=1)] = 64,
    group: Annotated[int, typer.Option(help="Query heads per kv head.", min=1)] = 4,
    kv_heads: Annotated[int, typer.Option(help="KV heads.", min=1)] = 2,
    top_k: Annotated[int, typer.Option(help="Pages chosen, besides the reserved ones.", min=0)] = 4,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    seed: Annotated[int, typer.Option(help="Seed of the data.")] = 0,
    device: Annotated[Device, typer.Option(help="Where it runs.")] = Device.cpu,
    impl: Annotated[list[Impl] | None, typer.Option(help="How it runs; both where not given.")] = None,
) -> None:
    """Holds every flow against float64 oracles over several decode steps, and says what sparsity cost."""
    impls = tuple(one.value for one in impl) if impl else ("reference", "triton")
    with refusals():
        for one in impls:
            prepare(device, Impl(one))
        if dtype not in DTYPES:
            raise OptionError(f"--dtype is {dtype!r}, expected one of {', '.join(DTYPES)}")
        sizes = {
            "page_size": page_size, "head_dim": head_dim, "group_size": group, "num_kv_heads": kv_heads,
            "top_k": top_k, "kv_dtype": DTYPES[dtype],
        }  # fmt: skip
        names = names_of(flow, flow_file)
        setup = Setup(sizes, pages, steps, seed, device.value, impls)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("decoding", total=len(names) * steps * len(impls))
            ok = verify(names, setup, lambda name: progress.update(task, advance=1, description=name))
    finish(ok)


if __name__ == "__main__":
    torch.set_num_threads(1)  # oracles are many small operations
    typer.run(main)
