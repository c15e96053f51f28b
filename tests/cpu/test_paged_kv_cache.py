"""PagedKVCache: growth, statistics of pages, writes in any order, and refusals."""

import pytest
import torch

import flowlib
from flowlib.errors import BackendError, BatchError, FormatError, OptionError, ShapeError
from tests.refusals import refused
from tests.suites.entmax_cache import BOTH, Scene


def test_forty_appends_with_regrowth():
    scene = Scene(max_seq_len=701)
    cache = scene.cache
    assert (cache.batch, cache.max_pages, cache.live_pages, cache.max_seq_len) == (2, 44, 44, 701)
    assert cache.kv.isfinite().all(), "what stands past a row's length is not stored"
    homes = {cache.max_pages}
    for step in range(1, 41):
        scene.append()
        homes.add(cache.max_pages)
        assert cache.seq_lens_host == (700 + step, 437 + step)
        assert cache.seq_lens.tolist() == [700 + step, 437 + step]
        assert cache.seq_lens.dtype is cache.block_table.dtype is torch.int32
    assert homes == {44, 66}, "one copy, half as large again"
    assert cache.live_pages == 47
    assert cache.kv.shape == (2, 2 * 66, 16, 2, 32)
    k, v = cache.dense()
    assert k.shape == v.shape == (2, 2, 740, 32)
    for b in range(2):
        n = len(scene.k[b])
        for stored, own in ((k, scene.k), (v, scene.v)):
            torch.testing.assert_close(stored[b, :, :n], own[b].transpose(0, 1), rtol=0, atol=0)
            assert stored[b, :, n:].eq(0).all()
        full = n // 16
        blocks = cache.block_table[b, :full].long()
        paged = scene.k[b][: full * 16].unflatten(0, (full, 16))
        stats = cache.page_stats
        torch.testing.assert_close(stats.k_min[blocks], paged.amin(1), rtol=0, atol=0)
        torch.testing.assert_close(stats.k_max[blocks], paged.amax(1), rtol=0, atol=0)
        torch.testing.assert_close(stats.k_mean[blocks].double(), paged.double().mean(1), rtol=0, atol=1e-6)
        wanted = paged.double().std(1, correction=0)
        torch.testing.assert_close(stats.k_std[blocks].double(), wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("lengths", "size", "foreseen", "pages"),
    [([5], 5, None, 65), ([16], 16, None, 66), ([5], 5, 100, 7), ([5, 40], 60, 20, 4), ([31], 31, 1, 2)],
)
def test_room_at_first(lengths, size, foreseen, pages):
    cache = flowlib.PagedKVCache(max_seq_len=foreseen)
    k = torch.randn(len(lengths), 1, size, 4)
    cache.initialize(k, k, lengths)
    assert cache.max_pages == pages
    assert cache.block_table.flatten().tolist() == list(range(pages * len(lengths)))
    assert cache.kv.isfinite().all()


def test_statistics_are_kept_as_asked():
    for stats, present in (((), (0, 0)), (("topk",), (1, 0)), (("gaussian",), (0, 1)), (BOTH, (1, 1))):
        scene = Scene((20,), stats=stats, max_seq_len=20)
        for _ in range(20):
            scene.append()
        kept_sets = scene.cache.page_stats
        assert (kept_sets.k_min is not None, kept_sets.k_std is not None) == tuple(map(bool, present))
        assert all(s is None or len(s) == scene.cache.kv.shape[1] for s in kept_sets)


def test_means_and_deviations_can_be_rounded():
    """To 16 bits, which is all that changes; appends round as well."""
    wide, narrow = (Scene((37,), stats=BOTH, stats_dtype=dtype) for dtype in (None, torch.bfloat16))
    for scene in (wide, narrow):
        for _ in range(12):
            scene.append()
    for name, kept in narrow.cache.page_stats._asdict().items():
        stats = getattr(wide.cache.page_stats, name)
        assert kept.dtype is (torch.bfloat16 if name in ("k_mean", "k_std") else torch.float32)
        torch.testing.assert_close(kept, stats.to(kept.dtype), rtol=0, atol=0)


def test_writes_in_any_order_refresh_every_page_they_touch():
    """Rejected tokens are written again, out of order; padding slots are skipped; a recycled page forgets its past."""
    scene = Scene((64,))
    cache = scene.cache
    slots = torch.tensor([33, -1, 5, 34, 6, -1, 4, 63], dtype=torch.int32)
    k, v = (torch.randn(8, 2, 32, generator=scene.g) for _ in range(2))
    before = cache.kv.clone()
    cache.write(k, v, slots)
    for i, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert cache.kv[0, slot // 16, slot % 16].equal(k[i])
            assert cache.kv[1, slot // 16, slot % 16].equal(v[i])
            before[:, slot // 16, slot % 16] = cache.kv[:, slot // 16, slot % 16]
    assert before.equal(cache.kv), "nothing else is written"
    assert cache.page_stats.k_max[:4].equal(cache.kv[0, :4].amax(1))
    torch.testing.assert_close(cache.page_stats.k_mean[:4], cache.kv[0, :4].mean(1))
    assert cache.seq_lens_host == (64,)
    cache.write(k[:0], v[:0], slots[:0])
    cache.write(k[:2], v[:2], torch.tensor([-1, -1]))
    assert before.equal(cache.kv)


def test_initialize_starts_anew():
    scene = Scene()
    k = torch.randn(3, 2, 17, 8)
    scene.cache.initialize(k, -k)
    assert scene.cache.seq_lens_host == (17, 17, 17)
    stored, values = scene.cache.dense()
    assert stored.equal(k)
    assert values.equal(-k)
    lens = torch.tensor([1, 17, 5], dtype=torch.int64)
    scene.cache.initialize(k, k, lens)
    assert scene.cache.seq_lens_host == (1, 17, 5)


def test_refusals_of_the_cache():
    for size in (0, 12, -16, 16.0, None):
        with refused(OptionError, f"PagedKVCache: page_size is {size!r}, expected a positive power of two"):
            flowlib.PagedKVCache(page_size=size)
    with refused(OptionError, "PagedKVCache: stats has 'mean', expected names out of 'topk', 'gaussian'"):
        flowlib.PagedKVCache(stats=("mean",))
    for dtype in (torch.int8, torch.float64, "float16"):
        with refused(OptionError, f"PagedKVCache: stats_dtype is {dtype!r}, expected torch.float32, torch.bfloat16"):
            flowlib.PagedKVCache(stats_dtype=dtype)
    with refused(FormatError, "initialize: k is torch.bfloat16, expected torch.float16 where stats_dtype is"):
        k = torch.zeros(1, 1, 5, 4, dtype=torch.bfloat16)
        flowlib.PagedKVCache(stats_dtype=torch.float16).initialize(k, k)
    with refused(OptionError, "PagedKVCache: max_seq_len is 0, expected an integer of at least 1"):
        flowlib.PagedKVCache(max_seq_len=0)
    cache, k = flowlib.PagedKVCache(), torch.zeros(2, 3, 5, 4)
    one = k[:, :, :1]
    for call in (lambda: cache.append(one, one), lambda: cache.write(k[0], k[0], torch.zeros(3)), cache.dense):
        with refused(BackendError, "PagedKVCache: the cache is empty; call initialize(k, v) first"):
            call()
    assert issubclass(BackendError, RuntimeError)
    assert (cache.batch, cache.max_pages, cache.live_pages, cache.seq_lens_host) == (0, 0, 0, ())
    with refused(ShapeError, "initialize: k is [3, 5, 4], expected [B, H_kv, S, D]"):
        cache.initialize(k[0], k[0])
    with refused(ShapeError, "initialize: v is [2, 3, 4, 4], expected [2, 3, 5, 4] as k"):
        cache.initialize(k, k[:, :, :4])
    with refused(FormatError, "initialize: v is torch.float16, expected torch.float32 as k"):
        cache.initialize(k, k.half())
    with refused(FormatError, "initialize: k is torch.int64, expected float16, bfloat16, float32 or float64"):
        cache.initialize(k.long(), k.long())
    with refused(ShapeError, "initialize: k is [2, 3, 0, 4], expected no empty axis [B, H_kv, S, D]"):
        cache.initialize(k[:, :, :0], k[:, :, :0])
    with refused(ShapeError, "initialize: k has 0 rows, expected at least one"):
        cache.initialize(k[:0], k[:0])
    with refused(BatchError, "initialize: seq_lens is [5], expected 2 integers, one for each row"):
        cache.initialize(k, k, [5])
    for lens in ([0, 5], [5, 6]):
        with refused(BatchError, f"initialize: seq_lens is {lens}, expected from 1 to 5, the tokens of k"):
            cache.initialize(k, k, lens)
    assert cache.batch == 0, "nothing is stored"
    cache.initialize(k, k)
    with refused(ShapeError, "append: k_new is [2, 3, 5, 4], expected [2, 3, 1, 4] [B, H_kv, 1, D]"):
        cache.append(k, k)
    with refused(ShapeError, "append: v_new is [2, 3, 2, 4], expected [2, 3, 1, 4] as k_new"):
        cache.append(one, k[:, :, :2])
    with refused(FormatError, "append: k and v are torch.float16, expected torch.float32, the dtype of the cache"):
        cache.append(one.half(), one.half())
    new = torch.zeros(2, 3, 4)
    with refused(FormatError, "write: slots is torch.float32, expected an int32 or int64 tensor [T]"):
        cache.write(new, new, torch.zeros(2))
    with refused(ShapeError, "write: slots is [3], expected [2] [T]"):
        cache.write(new, new, torch.zeros(3, dtype=torch.int64))
    for slot in (-2, 2 * 65 * 16):
        with refused(BatchError, f"write: slots has {slot}, expected from -1 to {2 * 65 * 16 - 1}"):
            cache.write(new, new, torch.tensor([0, slot]))
    assert cache.seq_lens_host == (5, 5)
