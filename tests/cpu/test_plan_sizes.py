"""What a plan allocates, and what it prints of it."""

import re

import pytest
import torch

import flowlib
from flowlib.ops import CMean, GeMV, topK
from flowlib.testing import scene

SPEC = flowlib.Spec(page_size=16, head_dim=64, group_size=3, num_kv_heads=2, top_k=4, max_pages=40, max_batch=5)


def printed_buffers(plan) -> dict[str, tuple[list[int], int]]:
    """Buffer name to printed shape and bytes."""
    lines = str(plan).split("\nbuffers (")[1].splitlines()
    found = (re.match(r"  (\w+) +fp32 \[([\d, ]+)\] (\d+) bytes", line) for line in lines)
    return {m[1]: ([int(n) for n in m[2].split(", ")], int(m[3])) for m in found if m}


@pytest.mark.parametrize("name", flowlib.list_flows(mla=False))
def test_the_printed_buffers_are_those_allocated(name):
    flow = flowlib.build(name)
    plan = flowlib.profile(flow, SPEC.replace(page_size=flow.default_page_size))
    work = plan.allocate(SPEC.max_batch, SPEC.max_pages, "cpu").workspace
    printed = printed_buffers(plan)
    assert set(printed) == set(plan.program.buffers)
    rows = SPEC.max_batch * SPEC.num_kv_heads
    for buffer, (shape, nbytes) in printed.items():
        pages = [SPEC.max_pages] if plan.program.buffers[buffer].paged else []
        assert shape == [rows, *plan.program.buffers[buffer].shape, *pages]
        assert nbytes == work[buffer].nbytes


def test_some_flow_has_a_buffer_per_row_and_one_per_page():
    plan = flowlib.profile(flowlib.build("centered_block_sparse_attention"), SPEC)
    assert {len(shape) for shape, _ in printed_buffers(plan).values()} == {3, 4}


@pytest.mark.parametrize("name", ["centered_block_sparse_attention", "streaming_attention"])
def test_what_attends_alone_needs_no_buffers_of_scoring(name):
    plan = flowlib.profile(flowlib.build(name), SPEC)
    lists, everything = plan.allocate(5, 40, "cpu", scores=False), plan.allocate(5, 40, "cpu")
    assert lists.raw_scores is None
    assert lists.scores is None
    assert set(everything.workspace) - set(lists.workspace) == set(plan.program.buffers)
    for name in ("o", "lse", "pages", "lengths"):
        assert getattr(lists, name).shape == getattr(everything, name).shape


class Remembers(flowlib.vFlow):
    """Keeps the first head_dim it is asked for."""

    scale = None

    def create_cache(self, page_size, head_dim):
        self.scale = self.scale or head_dim
        return {"centroid": (1, self.scale)}

    def forward_cache(self, cache, loc, ctx):
        CMean(dim=1)(cache["k"], cache["centroid"], loc=loc, ctx=ctx)

    def forward_indexer(self, q, o, cache, ctx):
        topK()(GeMV()(q.mean(dim=1, keepdim=True), cache["centroid"], ctx=ctx), o, ctx=ctx)


def test_asking_for_sizes_leaves_a_flow_as_it_was():
    flow = Remembers()
    assert flow.get_cache_meta_info(16, 32) == {"k": (16, 32), "v": (16, 32), "centroid": (1, 32)}
    assert flow.scale is None
    assert flow.run_indexer_virtual(3, 16, 32) == 32 * 2
    assert flow.scale is None
    assert flowlib.profile(flow, SPEC).fields["centroid"].shape == (1, 64)


@pytest.mark.parametrize("name", ["gqa_block_sparse_attention", "centered_block_sparse_attention", "quest"])
def test_steps_of_fewer_rows_share_one_allocation(name):
    """CUDA graphs of several batch sizes take views of the buffers of the largest."""
    sizes = {"page_size": 4, "head_dim": 16, "group_size": 2, "num_kv_heads": 1, "max_pages": 40, "top_k": 34}
    plan = flowlib.profile(flowlib.build(name), flowlib.Spec(**sizes, kv_dtype=torch.float32))
    whole = plan.allocate(5, 40, "cpu")
    splits = set()
    for rows in (5, 3, 1):
        made = scene(plan, [150, 90, 33, 7, 1][:rows], seed=rows)
        out = plan.narrowed(whole, rows)
        splits.add(out.num_splits)
        assert out.o.data_ptr() == whole.o.data_ptr()
        plan.launch(made.q, made.pool_by("triton"), made.batch, out)
        fresh = plan.step(made.q, made.pool_by("triton"), made.batch, impl="triton")
        assert torch.equal(out.pages[:, :, :36], fresh.pages[:, :, :36])
        assert torch.equal(out.o, fresh.o)
        assert torch.equal(out.lse, fresh.lse)
    assert max(splits) > 1
