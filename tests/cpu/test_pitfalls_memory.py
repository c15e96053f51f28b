"""Public failures 34 to 42, dtypes, addresses and shared pages; docs/pitfalls.md tells which."""

import pytest
import torch

import flowlib
from flowlib.errors import BatchError, FormatError, OptionError, ShapeError
from flowlib.testing import expect, fill_nan
from tests.refusals import refused
from tests.suites.same import IMPLEMENTATIONS, bits, differing
from tests.suites.worlds import World, int32, near, random_tokens, slots_of, table_of, world

impls = pytest.mark.parametrize("impl", IMPLEMENTATIONS)
FP8 = torch.float8_e4m3fn
SPEC = flowlib.Spec(page_size=4, head_dim=8, group_size=3, num_kv_heads=2, top_k=2, max_pages=32, max_batch=8)


def test_pitfall_34_float8_labelled_uint8_is_refused():
    plan = flowlib.profile(flowlib.build("quest"), SPEC.replace(kv_dtype=FP8))
    pool = flowlib.PagedPool(plan, num_pages=3)
    with refused(FormatError, "KVStore: 'k' is torch.uint8, expected torch.float8_e4m3fn"):
        flowlib.KVStore(plan, pool.k.view(torch.uint8), pool.v, pool.fields)
    with refused(OptionError, "Spec: kv_dtype is torch.uint8, expected one of", "float8_e4m3fn"):
        SPEC.replace(kv_dtype=torch.uint8)
    same = flowlib.KVStore(plan, pool.k.view(torch.uint8).view(FP8), pool.v, pool.fields)
    assert same.k.data_ptr() == pool.k.data_ptr()


@impls
@pytest.mark.parametrize("k_scale", [0.03, 4.0])
def test_pitfall_35_summaries_of_a_float8_pool_are_descaled(k_scale, impl):
    spec = SPEC.replace(kv_dtype=FP8, k_scale=k_scale, v_scale=0.5)
    made = world("block_sparse_attention", spec, [41], impl=impl)
    for page in range(10):
        keys = made.k[0][4 * page : 4 * page + 4]
        wanted = expect(lambda k: (k * k_scale).mean(0), [keys], dtype=torch.bfloat16)
        verdict = wanted.judge(made.pool.fields["centroid"][made.pages[0][page], :, 0])
        assert verdict.ok, verdict
    made.judged(made.step(impl=impl), made.queries(), impl)


@impls
def test_pitfall_36_float8_and_bfloat16_pools_agree(impl):
    """The same keys and values in both: the cosine of the outputs is above 0.99, layer after layer."""
    for seed in range(3):
        k, v = random_tokens(SPEC, [60, 33], seed)
        half = world("quest", SPEC.replace(top_k=16), [60, 33], k=k, v=v)
        scales = {"k_scale": 0.25, "v_scale": 0.5}
        spec = SPEC.replace(kv_dtype=FP8, top_k=16, **scales)
        eight = world("quest", spec, [60, 33], k=[x.float() / 0.25 for x in k], v=[x.float() / 0.5 for x in v])
        q = half.queries(seed)
        cosine = torch.cosine_similarity(half.step(q, impl).o.double(), eight.step(q, impl).o.double(), dim=-1)
        assert float(cosine.min()) > 0.99


def test_pitfall_37_another_layout_of_the_pool_is_refused():
    plan = flowlib.profile(flowlib.build("quest"), SPEC)
    pool = flowlib.PagedPool(plan, num_pages=3)
    with refused(ShapeError, "KVStore: 'k' is [2, 12, 8], expected [2, 2, 8]"):
        flowlib.KVStore(plan, pool.k.transpose(0, 1), pool.v, pool.fields)
    shuffled = torch.empty(8, 2, 12, dtype=torch.bfloat16).permute(2, 1, 0)
    with refused(FormatError, "KVStore: the last axis of 'k' has stride 24, expected 1"):
        flowlib.KVStore(plan, shuffled, pool.v, pool.fields)
    with refused(FormatError, "KVStore: field 'k_max' is not contiguous"):
        fields = {**pool.fields, "k_max": torch.empty(2, 3, 1, 8, dtype=torch.bfloat16).transpose(0, 1)}
        flowlib.KVStore(plan, pool.k, pool.v, fields)


@impls
def test_pitfall_38_queries_whose_rows_lie_beyond_32_bits_of_elements(impl, tmp_path):
    made = world("quest", SPEC, [60, 33])
    q = made.queries()
    stride = (1 << 31) + 16
    path = tmp_path / "queries"
    storage = torch.from_file(str(path), shared=True, size=stride + q[0].numel(), dtype=torch.bfloat16)  # sparse
    far = storage.as_strided(q.shape, (stride, 8, 1))
    far.copy_(q)
    assert not differing(made.step(q, impl), made.step(far, impl))


def shared(spec: flowlib.Spec, prefix: int, lengths: tuple[int, int], share: bool) -> World:
    """Two requests with the same first `prefix` tokens, whose whole pages they share or hold twice."""
    size = spec.page_size
    k, v = random_tokens(spec, lengths)
    for x in (k, v):
        x[1][:prefix] = x[0][:prefix]
    common = prefix // size if share else 0
    counts = [-(-n // size) for n in lengths]
    first = list(range(counts[0]))
    second = first[:common] + [counts[0] + i for i in range(counts[1] - common)]
    plan = flowlib.profile(flowlib.build("quest"), spec)
    pool = flowlib.PagedPool(plan, counts[0] + counts[1])
    for own, keys, values in zip((first, second), k, v, strict=True):
        pool.write(keys, values, slots_of(own, len(keys), size))
    pages = (tuple(first), tuple(second))
    return World(plan, pool, flowlib.Batch(table_of(pages), int32(list(lengths))), pages, tuple(k), tuple(v))


@impls
def test_pitfall_39_two_requests_share_a_prefix_and_branch(impl):
    """37 tokens, so a page is shared in part: whole pages are shared, that one is not. Then one request goes."""
    spec = SPEC.replace(page_size=16)
    together, apart = (shared(spec, 37, (90, 75), share) for share in (True, False))
    assert set(together.pages[0]) & set(together.pages[1]) == {0, 1}
    q = together.queries()
    assert not differing(together.step(q, impl), apart.step(q, impl))
    gone = set(together.pages[0]) - set(together.pages[1])
    for page in gone:
        fill_nan(together.pool.k[16 * page : 16 * page + 16])
        fill_nan(together.pool.v[16 * page : 16 * page + 16])
        for field in together.pool.fields.values():
            fill_nan(field[page])
    rest = [w.step(q[1:], impl, flowlib.Batch(w.batch.page_table[1:], w.batch.seq_lens[1:])) for w in (together, apart)]
    assert not differing(*rest)


@impls
def test_pitfall_40_summaries_move_with_their_pages(impl):
    """K and V copied to other pages alone leave the fields behind; refresh makes them from what was copied."""
    made = world("quest", SPEC, [61])
    q, size = made.queries(), 4
    before = made.step(q, impl)
    elsewhere = flowlib.PagedPool(made.plan, 40)
    for value in elsewhere.fields.values():
        fill_nan(value)
    moved = [39 - i for i in range(len(made.pages[0]))]
    old, new = slots_of(made.pages[0], 61, size), slots_of(moved, 61, size)
    elsewhere.k[new], elsewhere.v[new] = made.pool.k[old], made.pool.v[old]
    batch = flowlib.Batch(table_of([moved], made.batch.width), made.batch.seq_lens)
    dtype = torch.float64 if impl == "reference" else None
    without = made.plan.step(q, elsewhere, batch, impl=impl, dtype=dtype)
    assert without.lengths.tolist() == [[2, 2]], "without summaries no page can be chosen, and none is made up"
    elsewhere.refresh(torch.tensor(moved[:-1]), impl=impl)
    assert not differing(before, made.plan.step(q, elsewhere, batch, impl=impl, dtype=dtype))


@impls
def test_pitfall_41_a_pool_that_is_exactly_full(impl):
    """Three long requests fill every page; one is given up half-way and its pages go to another, and nothing leaks."""
    lengths = [64, 64, 32]
    plan = flowlib.profile(flowlib.build("quest"), SPEC)
    k, v = random_tokens(SPEC, [*lengths, 64])
    pool = flowlib.PagedPool(plan, num_pages=40)
    pages = [list(range(0, 16)), list(range(16, 32)), list(range(32, 40))]
    for own, keys, values in zip(pages, k, v, strict=False):
        pool.write(keys, values, slots_of(own, len(keys), 4), impl=impl)
    with refused(BatchError, "write: loc has 160, expected from 0 to 159"):
        pool.write(k[3][:1], v[3][:1], torch.tensor([160]), impl=impl)
    reused = pages[1]
    pool.write(k[3], v[3], slots_of(reused, 64, 4), impl=impl)
    fresh = flowlib.PagedPool(plan, num_pages=40)
    fresh.write(k[3], v[3], slots_of(reused, 64, 4), impl=impl)
    for field, value in pool.fields.items():
        assert torch.equal(bits(value[reused]), bits(fresh.fields[field][reused]))


@impls
@pytest.mark.parametrize("name", ["running_avg_block_sparse_attention", "quest"])
def test_pitfall_42_a_request_leaves_nothing_to_the_next(name, impl):
    """A, B, A in the same pages: both answers to A are the same."""
    made = world(name, SPEC, [61])
    own, (k, v) = slots_of(made.pages[0], 61, 4), random_tokens(SPEC, [61], seed=9)
    answers = []
    for keys, values in ((made.k[0], made.v[0]), (k[0] * 3, v[0]), (made.k[0], made.v[0])):
        made.pool.write(keys, values, own, impl=impl)
        answers.append([made.step(made.queries(step), impl) for step in range(3)])
    for first, last in zip(answers[0], answers[2], strict=True):
        assert not differing(first, last)
    assert differing(answers[0][0], answers[1][0])


@impls
@pytest.mark.parametrize("offset", [-50.0, 0.0])
def test_pitfall_42_negative_and_equal_scores(offset, impl):
    """Scores below 0, or all the same, are scores: the budget is used, and nothing else is attended."""
    levels = torch.arange(15).float() % 7 * 0.5 if offset else torch.ones(15)
    k = (levels + offset).repeat_interleave(4)[:, None, None].expand(60, 2, 8).contiguous()
    made = world("block_sparse_attention", SPEC.replace(kv_dtype=torch.float32), [60], k=[k])
    out = made.step(torch.ones(1, 6, 8), impl)
    assert out.lengths.tolist() == [[4, 4]]
    assert out.pages[0, 0].tolist() == ([0, 6, 13, 14] if offset else [0, 1, 2, 14])
    assert bool((out.scores[..., 1:14] < 0).all()) is bool(offset)
    assert near(out.scores[0, 0, 1:14], (levels + offset)[1:14] * 8)
