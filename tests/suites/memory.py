"""What lies in the pool beside a row's own tokens never shows: paging is invisible."""

import pytest
import torch

import flowlib
from flowlib.testing import fill_nan, scene
from tests.suites.flow_cases import FLOWS, plan_for
from tests.suites.same import IMPLEMENTATIONS, LENGTHS, SPEC, bits, differing, int32, page_counts, tokens, total

flows = pytest.mark.parametrize("name", FLOWS)
impls = pytest.mark.parametrize("impl", IMPLEMENTATIONS)


def scene_of(name: str, device: str, spec: flowlib.Spec = SPEC):
    plan = plan_for(name, spec)
    factor = plan.spec.page_size / spec.page_size
    return scene(plan, [int(n * factor) for n in LENGTHS], device=device)


@flows
@impls
def test_where_the_pages_lie_changes_nothing(name, impl, device):
    made = scene_of(name, device)
    store, size = made.pool_by(impl), made.spec.page_size
    moved = store.clone()
    order = torch.randperm(store.num_pages, generator=torch.Generator().manual_seed(1)).to(device)
    slots = (order[:, None] * size + torch.arange(size, device=device)).flatten()
    for mine, theirs in ((moved.k, store.k), (moved.v, store.v)):
        mine[slots] = theirs
    for field, value in store.fields.items():
        moved.fields[field][order] = value
    owned = torch.arange(made.batch.width, device=device) < -(-made.batch.seq_lens[:, None] // size)
    table = torch.where(owned, order[torch.where(owned, made.batch.page_table, 0)].to(torch.int32), -5)
    batch = flowlib.Batch(table, made.batch.seq_lens)
    before = made.plan.step(made.q, store, made.batch, impl=impl)
    assert not differing(before, made.plan.step(made.q, moved, batch, impl=impl))


@flows
@impls
def test_what_is_not_owned_or_not_written_changes_nothing(name, impl, device):
    """A scene is NaN in every unowned page, unwritten slot and unfinished field, and its table's tail is no page."""
    made = scene_of(name, device)
    hostile = made.pool_by(impl)
    clean = hostile.clone()
    poisoned = 0
    for value in (clean.k, clean.v, *clean.fields.values()):
        poisoned += int(value.isnan().sum())
        value.nan_to_num_(0.0)
    assert poisoned, "the scene is hostile"
    table = made.batch.page_table.clone()
    outside = (table < 0) | (table >= clean.num_pages)
    assert outside.any()
    batch = flowlib.Batch(torch.where(outside, 0, table), made.batch.seq_lens)
    before = made.plan.step(made.q, hostile, made.batch, impl=impl)
    assert not differing(before, made.plan.step(made.q, clean, batch, impl=impl))
    assert before.o.isfinite().all()
    assert total(before)[made.batch.seq_lens > 0].isfinite().all()


@flows
@impls
def test_a_freed_and_reused_page_shows_no_trace(name, impl, device):
    """Request B takes over the pages and the state of A, in another order and with an unfinished page at its end."""
    plan = plan_for(name, SPEC)
    spec, size = plan.spec, plan.spec.page_size
    fresh, used = (flowlib.PagedPool(plan, num_pages=9, device=device) for _ in range(2))
    for value in (fresh.k, fresh.v, *fresh.fields.values()):
        fill_nan(value)
    loud = tokens(spec, 9 * size, seed=1, device=device, scale=50.0)
    used.write(*loud, torch.arange(9 * size, device=device), impl=impl)
    q = torch.randn(1, spec.num_heads, spec.head_dim, generator=torch.Generator().manual_seed(3)).to(spec.field_dtype)
    everything = flowlib.Batch(int32([list(range(9))], device), int32([9 * size], device))
    plan.step(q.to(device), used, everything, impl=impl)
    own, length = [7, 2, 5, 0, 8, 3, 6], 7 * size - max(size // 2, 1)
    slots = torch.tensor([p * size + s for p in own for s in range(size)][:length], device=device)
    k, v = tokens(spec, length, seed=2, device=device)
    batch = flowlib.Batch(int32([[*own, -1]], device), int32([length], device))
    outputs = []
    for pool in (fresh, used):
        for part in (slice(0, length // 2), slice(length // 2, None)):
            pool.write(k[part], v[part], slots[part], impl=impl)
        outputs.append(plan.step(q.to(device), pool, batch, impl=impl))
    assert not differing(*outputs)
    for field, value in fresh.fields.items():
        finished = own[: length // size]
        assert torch.equal(bits(value[finished]), bits(used.fields[field][finished]))


@flows
@impls
def test_refresh_mends_a_rewrite_that_missed_the_last_slot(name, impl, device):
    plan = plan_for(name, SPEC)
    spec, size = plan.spec, plan.spec.page_size
    straight, mended = (flowlib.PagedPool(plan, num_pages=4, device=device) for _ in range(2))
    loc = torch.arange(4 * size, device=device)
    k, v = tokens(spec, len(loc), seed=1, device=device)
    straight.write(k, v, loc, impl=impl)
    backwards = loc.flip(0)
    for one in backwards.split(2 * size - 1):  # the last slot of some pages comes before their other slots
        mended.write(k[one], v[one], one, impl=impl)
    stale = [n for n in plan.fields if not torch.equal(bits(mended.fields[n]), bits(straight.fields[n]))]
    assert bool(stale) == bool(plan.fields and size > 1), "the rewrite went past forward_cache"
    mended.refresh(torch.arange(4, device=device), impl=impl)
    for field in plan.fields:
        assert torch.equal(bits(mended.fields[field]), bits(straight.fields[field]))


@flows
@impls
def test_a_page_is_summarised_after_all_its_tokens_are_stored(name, impl, device):
    """In one call the order of the tokens means nothing."""
    plan = plan_for(name, SPEC)
    size = plan.spec.page_size
    loc = torch.arange(3 * size, device=device)
    k, v = tokens(plan.spec, len(loc), seed=1, device=device)
    shuffled = torch.randperm(len(loc), generator=torch.Generator().manual_seed(2)).to(device)
    straight, mixed = (flowlib.PagedPool(plan, num_pages=4, device=device) for _ in range(2))
    straight.write(k, v, loc, impl=impl)
    mixed.write(k[shuffled], v[shuffled], loc[shuffled], impl=impl)
    for field in plan.fields:
        assert torch.equal(bits(mixed.fields[field]), bits(straight.fields[field]))
    assert torch.equal(bits(mixed.k), bits(straight.k))
    assert torch.equal(bits(mixed.v), bits(straight.v))


@impls
def test_an_unfinished_page_keeps_its_field(impl, device):
    plan = flowlib.profile(flowlib.build("quest"), SPEC)
    pool, size = flowlib.PagedPool(plan, num_pages=3, device=device), SPEC.page_size
    for value in pool.fields.values():
        value.fill_(-77.0)
    loc = torch.arange(2 * size - 1, device=device)
    pool.write(*tokens(SPEC, len(loc), seed=1, device=device), loc, impl=impl)
    for value in pool.fields.values():
        assert (value[0] != -77.0).all()
        assert (value[1:] == -77.0).all()


@flows
@impls
def test_a_step_reads_storage_that_somebody_else_owns(name, impl, device):
    """Strided K and V, as in a serving engine's buffers; nothing is copied."""
    made = scene_of(name, device)
    store = made.pool_by(impl)
    buffers = [x.new_full((len(x), 2 * x.shape[1], x.shape[2] + 8), 9.0) for x in (store.k, store.v)]
    k, v = (buffer[:, ::2, :-8] for buffer in buffers)
    k.copy_(store.k)
    v.copy_(store.v)
    foreign = flowlib.KVStore(made.plan, k, v, {n: f.clone() for n, f in store.fields.items()})
    before = made.plan.step(made.q, store, made.batch, impl=impl)
    assert not differing(before, made.plan.step(made.q, foreign, made.batch, impl=impl))
    size, first = made.spec.page_size, made.pages[0][0] * made.spec.page_size
    new = tokens(made.spec, size, seed=5, device=device)
    foreign.write(*new, torch.arange(first, first + size, device=device), impl=impl)
    for buffer, mine in zip(buffers, new, strict=True):
        assert torch.equal(buffer[first : first + size, ::2, :-8], mine)
        assert (buffer[:, 1::2] == 9.0).all()
        assert (buffer[..., -8:] == 9.0).all()


@pytest.mark.parametrize("name", ["gqa_block_sparse_attention", "gqa_quest_sparse_attention"])
@impls
def test_addresses_beyond_32_bits(name, impl, device, tmp_path):
    """Pages at the end of a pool of more than 2^31 elements; its files are sparse, and only a few pages are touched."""
    spec = flowlib.Spec(page_size=1, head_dim=64, num_kv_heads=2, group_size=2, top_k=3, max_pages=24)
    plan = flowlib.profile(flowlib.build(name), spec)
    num_pages = 2**31 // (2 * 64) + 64

    def storage(label: str, *shape: int) -> torch.Tensor:
        size = num_pages * 2 * 64
        if device != "cpu":
            return torch.zeros(size, dtype=torch.bfloat16, device=device).view(shape)
        with open(tmp_path / label, "wb") as file:
            file.truncate(2 * size)
        return torch.from_file(str(tmp_path / label), shared=True, size=size, dtype=torch.bfloat16).view(shape)

    k, v = (storage(label, num_pages, 2, 64) for label in "kv")
    huge = flowlib.KVStore(plan, k, v, {n: storage(n, num_pages, 2, 1, 64) for n in plan.fields})
    small = flowlib.PagedPool(plan, num_pages=20, device=device)
    keys, values = tokens(spec, 20, seed=1, device=device)
    q = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16).to(device)
    outputs = []
    for store, first in ((small, 0), (huge, num_pages - 20)):
        own = torch.arange(first, first + 20, device=device)
        store.write(keys, values, own, impl=impl)
        batch = flowlib.Batch(own.to(torch.int32)[None].contiguous(), int32([20], device))
        outputs.append(plan.step(q, store, batch, impl=impl))
    assert not differing(*outputs)
    assert outputs[0].lengths.tolist() == [[5, 5]]


def test_the_lengths_of_the_suite_reach_past_the_budget():
    counts = page_counts(LENGTHS, SPEC.page_size)
    covered = SPEC.top_k + SPEC.bos + SPEC.eos
    assert max(counts) > covered
    assert covered in counts
    assert 0 in counts
