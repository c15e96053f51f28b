"""A decode step in a CUDA graph: lengths change between replays, nothing waits, nothing is allocated."""

import pytest
import torch

import flowlib
from flowlib.testing import fill_nan, scene
from tests.gpu.waiting import waiting_is_an_error
from tests.suites.flow_cases import FLOWS, plan_for
from tests.suites.same import SPEC, bits, differing

flows = pytest.mark.parametrize("name", FLOWS)
SIZES = SPEC.replace(head_dim=64, v_head_dim=None, page_size=16, max_pages=40, top_k=4)
TOKENS = (40 * 16, 33 * 16 - 5, 20 * 16, 7 * 16 + 1, 3, 29 * 16)


def scene_of(name: str):
    plan = plan_for(name, SIZES)
    return scene(plan, [max(1, n * plan.spec.page_size // 16) for n in TOKENS], device="cuda")


def lengths_of(made) -> list[torch.Tensor]:
    """Other lengths of the same rows: all of them, shorter ones, padded rows without a token, a single row, none."""
    full = made.batch.seq_lens.clone()
    rows = torch.arange(len(full), device="cuda", dtype=torch.int32)
    return [full, full - full // 3, full * (rows % 2), full * (rows == 3), full * 0, full]


def warm(made, store, out) -> None:
    """Compiles what a step launches, outside of the capture."""
    made.plan.launch(made.q, store, made.batch, out)
    torch.cuda.synchronize()


@flows
def test_replays_equal_fresh_steps(name):
    made = scene_of(name)
    plan, store, fresh = made.plan, made.pool_by("triton"), made.pool_by("triton")
    batch = flowlib.Batch(made.batch.page_table.clone(), made.batch.seq_lens.clone())
    q, out = made.q.clone(), plan.allocate(made.batch.size, made.batch.width, "cuda")
    warm(made, made.pool_by("triton"), out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.launch(q, store, batch, out)
    for i, seq_lens in enumerate(lengths_of(made)):
        for value in (out.o, out.lse, out.tau, out.mass):
            if value is not None:
                fill_nan(value)
        out.pages.fill_(-99)
        batch.seq_lens.copy_(seq_lens)
        q.copy_(made.q.roll(i, 0))
        graph.replay()
        again = plan.step(made.q.roll(i, 0), fresh, flowlib.Batch(made.batch.page_table, seq_lens), impl="triton")
        assert not differing(out, again), f"replay {i}"
        for field, value in store.fields.items():
            assert torch.equal(bits(value), bits(fresh.fields[field])), f"state {field!r} after replay {i}"


@flows
def test_updates_are_captured_with_padded_slots(name):
    """Slots of -1, as a padded batch has them, write nothing."""
    made = scene_of(name)
    plan, size = made.plan, made.spec.page_size
    if not plan.fields:
        pytest.skip("the flow has no fields")
    slots = made.finished_slots()
    store, wanted = made.pool_by("triton"), made.pool_by("triton")
    loc = torch.full((8,), -1, dtype=torch.int64, device="cuda")
    plan.update(store, loc, impl="triton")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.update(store, loc, impl="triton")
    for value in store.fields.values():
        fill_nan(value)
    for part in slots.split(5):
        loc.fill_(-1)
        loc[1 : 1 + len(part)] = part
        graph.replay()
    finished = slots // size
    for field, value in wanted.fields.items():
        assert torch.equal(bits(store.fields[field][finished]), bits(value[finished]))
        others = torch.ones(store.num_pages, dtype=torch.bool, device="cuda")
        others[finished] = False
        assert store.fields[field][others].isnan().all()


@flows
def test_a_step_neither_waits_nor_allocates(name):
    made = scene_of(name)
    plan, store = made.plan, made.pool_by("triton")
    out, slots = plan.allocate(made.batch.size, made.batch.width, "cuda"), made.finished_slots()
    warm(made, store, out)
    plan.update(store, slots, impl="triton")
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with waiting_is_an_error():
        plan.launch(made.q, store, made.batch, out)
        plan.update(store, slots, impl="triton")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_waiting_would_be_noticed():
    with waiting_is_an_error(), pytest.raises(RuntimeError, match="synchronizing"):
        torch.ones(1, device="cuda").item()


@flows
def test_fifty_runs_are_identical(name):
    made = scene_of(name)
    start = made.pool_by("triton")
    first = made.plan.step(made.q, start.clone(), made.batch, impl="triton")
    for i in range(50):
        assert not differing(first, made.plan.step(made.q, start.clone(), made.batch, impl="triton")), f"run {i}"


@flows
def test_checks_on_the_device_are_left_to_the_caller(name):
    """A step on a GPU looks at shapes only: the lengths stay on the device."""
    made = scene_of(name)
    store = made.pool_by("triton")
    made.plan.step(made.q, store, made.batch, impl="triton")
    torch.cuda.synchronize()
    with waiting_is_an_error():
        flowlib.Batch(made.batch.page_table, made.batch.seq_lens)
        made.plan.check_step(made.q, store, made.batch)
