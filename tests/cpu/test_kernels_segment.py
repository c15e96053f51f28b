"""Softmax over a row's scored pages and the page table of a step, interpreted."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import math

import pytest
import torch

from flowlib.kernels import segment
from flowlib.kernels.planning import launch_page_table
from flowlib.runtime import interpreter

interpreter.install()

PAGE, HEADS, UNTOUCHED = 16, 2, 7.0


def softmax_of(x: torch.Tensor, seq_lens: list[int], bos: int, eos: int, scale: float) -> torch.Tensor:
    want = torch.full(x.shape, UNTOUCHED, dtype=torch.float64)
    for row in range(x.shape[0]):
        n_pages = min(-(-seq_lens[row // HEADS] // PAGE), x.shape[2])
        want[row, :, :n_pages] = 0
        if n_pages > bos + eos:
            part = slice(bos, n_pages - eos)
            want[row, :, part] = (x[row, :, part].double() * scale).softmax(-1)
    return want


def inputs(planes: int, width: int, seq_lens: list[int], bos: int, eos: int) -> torch.Tensor:
    x = torch.full((len(seq_lens) * HEADS, planes, width), math.nan)
    for row in range(x.shape[0]):
        scored = slice(bos, max(bos, min(-(-seq_lens[row // HEADS] // PAGE), width) - eos))
        x[row, :, scored] = torch.randn_like(x[row, :, scored]) * 5
    return x


@pytest.mark.parametrize("loop", [False, True], ids=["in registers", "in a loop"])
@pytest.mark.parametrize("width", [1, 2, 33, 1025])
@pytest.mark.parametrize(("bos", "eos"), [(1, 1), (0, 2)])
def test_softmax_sees_only_the_scored_pages(monkeypatch, loop, width, bos, eos):
    if loop:
        monkeypatch.setattr(segment, "_REGISTER_WIDTH", 0)
        monkeypatch.setattr(segment, "_LOOP_BLOCK", 512)
    torch.manual_seed(width)
    seq_lens = [width * PAGE, 0, 1, max(1, width // 2 * PAGE - 5)]
    x = inputs(3, width, seq_lens, bos, eos)
    y = torch.full_like(x, UNTOUCHED)
    segment.launch_softmax(
        x, y, torch.tensor(seq_lens, dtype=torch.int32), num_kv_heads=HEADS, page_size=PAGE, bos=bos, eos=eos, scale=0.3
    )
    want = softmax_of(x, seq_lens, bos, eos, 0.3)
    # an exponent of size z costs z rounding steps relative to the result
    steps = 4 + float(torch.nan_to_num(x).abs().max()) * 0.3 * 2
    torch.testing.assert_close(y.double(), want, rtol=steps * torch.finfo(torch.float32).eps, atol=0)


def test_softmax_in_place_over_strided_planes():
    torch.manual_seed(0)
    seq_lens = [40 * PAGE, 3 * PAGE]
    x = inputs(2, 41, seq_lens, 1, 1)
    want = softmax_of(x, seq_lens, 1, 1, 1.0)
    store = torch.full((4, 50, 2), UNTOUCHED)
    view = store.transpose(1, 2)[:, :, :41]
    view.copy_(torch.where(torch.isnan(x), torch.tensor(UNTOUCHED), x))
    segment.launch_softmax(
        view,
        view,
        torch.tensor(seq_lens, dtype=torch.int32),
        num_kv_heads=HEADS,
        page_size=PAGE,
        bos=1,
        eos=1,
        scale=1.0,
    )
    torch.testing.assert_close(view.double(), want, rtol=1e-5, atol=0)
    assert (store[:, 41:] == UNTOUCHED).all()


def test_softmax_of_nothing_but_minus_infinity_is_nan():
    x = torch.full((1, 1, 6), -math.inf)
    segment.launch_softmax(
        x, x, torch.tensor([6 * PAGE], dtype=torch.int32), num_kv_heads=1, page_size=PAGE, bos=1, eos=1, scale=1.0
    )
    assert torch.equal(torch.isnan(x[0, 0]), torch.tensor([False, True, True, True, True, False]))


@pytest.mark.parametrize("page", [1, 16, 48])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_page_table_follows_the_token_table(page, dtype):
    torch.manual_seed(page)
    width, context = 70, 70 * page - (page > 1)
    pages = torch.randint(1, 100_000, (5, width), dtype=torch.int32)
    tokens = (pages[:, :, None] * page + torch.arange(page, dtype=torch.int32)).view(5, -1)[:, :context]
    table = torch.full((4, width + 9), -5, dtype=torch.int32)[:, : width + 2]
    requests, seq_lens = torch.tensor([4, 0, 2, 2], dtype=dtype), [page + 1, 0, context, 10**6]
    launch_page_table(tokens, requests, torch.tensor(seq_lens, dtype=dtype), table, page_size=page)
    for row, seq_len in enumerate(seq_lens):
        n_pages = -(-min(seq_len, context) // page)
        assert torch.equal(table[row, :n_pages], pages[int(requests[row]), :n_pages])
        assert (table[row, n_pages:] == -5).all()
