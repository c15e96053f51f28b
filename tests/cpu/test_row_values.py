"""Values of a row alone, made of large blocks: computed once per row, in a kernel before its pages are scored."""

import pytest
import torch

import flowlib
from flowlib import ops, vFlow
from flowlib.compiler.emit import column_blocks, joined_name, num_warps
from flowlib.testing import Case, scene, verify_flow

SIZES = {"page_size": 16, "head_dim": 96, "group_size": 100, "num_kv_heads": 2, "max_pages": 24, "top_k": 3}
LENGTHS = (333, 0, 48)


def stage_of(plan):
    return next((s for s in plan.program.step_stages if s.name == "rows"), None)


class OfQueries(vFlow):
    """Scores of some value of the queries and the mean key."""

    def __init__(self, *steps, first=None):
        self.steps, self.first = steps, first
        self.cmean, self.multiply, self.sum, self.topk = ops.CMean(dim=1), ops.Multiply(), ops.Sum(dim=2), ops.topK()
        self.gemm, self.max = ops.GeMM(), ops.Max(dim=2)

    def create_cache(self, page_size, head_dim):
        return {"row_mean": (1, head_dim)}

    def forward_cache(self, cache, loc, ctx):
        self.cmean(cache["k"], cache["row_mean"], loc=loc, ctx=ctx)

    def forward_indexer(self, q, o, cache, ctx):
        value = q
        for step in self.steps:
            value = step(value, ctx=ctx)
        score = self.sum(self.multiply(value, cache["row_mean"], ctx=ctx), ctx=ctx)
        if self.first is not None:
            score = self.first(score, self.max(self.gemm(q, cache["row_mean"], ctx=ctx), ctx=ctx), ctx=ctx)
        self.topk(score, o, ctx=ctx)


def agree(flow, **changes):
    """The plan of a flow whose pages and o are the same by the reference and by Triton."""
    plan = flowlib.profile(flow, flowlib.Spec(**{**SIZES, "kv_dtype": torch.float32, **changes}))
    made = scene(plan, [333, 90, 48], seed=0)
    reference, triton = (plan.step(made.q, made.pool_by(i), made.batch, impl=i) for i in ("reference", "triton"))
    assert torch.equal(reference.pages, triton.pages)
    assert (reference.o - triton.o).abs().max() <= 64 * torch.finfo(torch.float32).eps * reference.o.abs().max()
    return plan


@pytest.mark.parametrize(
    ("steps", "blocks"),
    [
        ((ops.Mean(dim=1),), (32, 3)),
        ((ops.Scaled(), ops.Std(dim=1)), (32, 3)),
        ((ops.Abs(), ops.Max(dim=1), ops.Clamp(0.5, 2.0)), (32, 3)),
        ((ops.L2Norm(dim=2), ops.Mean(dim=1)), (0, 1)),
        ((ops.MeanInterleave(dim=1, k=50), ops.Max(dim=1)), (32, 3)),
        ((ops.Mean(dim=1), ops.MeanInterleave(dim=2, k=96)), (0, 1)),
    ],
    ids=["mean", "deviation", "elementwise", "norms", "groups", "groups-of-columns"],
)
def test_a_row_is_reduced_once(steps, blocks):
    """Program by program of columns where every op goes column by column, else by one program with more warps."""
    stage = stage_of(agree(OfQueries(*steps)))
    assert stage.per_row
    assert column_blocks(stage) == blocks
    assert num_warps(stage) == (4 if blocks[0] else 8)


class MaskedMean(OfQueries):
    """The mean query with some channels left out."""

    def forward_indexer(self, q, o, cache, ctx):
        mean = q.mean(dim=1, keepdim=True)
        masked = self.multiply(mean, self.first(mean, ctx=ctx), ctx=ctx)
        self.topk(self.sum(self.multiply(masked, cache["row_mean"], ctx=ctx), ctx=ctx), o, ctx=ctx)


def test_positions_along_columns_are_those_of_the_whole_row():
    plan = agree(MaskedMean(first=ops.MaskSlice(10, 70, dim=2, alpha=0.5, beta=-1.0)))
    assert column_blocks(stage_of(plan)) == (32, 3)


@pytest.mark.parametrize(("group", "dim"), [(4, 128), (8, 128), (64, 128), (128, 64), (16, 512)])
def test_small_blocks_stay_where_they_are_used(group, dim):
    for name in ("block_sparse_attention", "quest_sparse_attention", "lserve_sparse_attention"):
        plan = flowlib.profile(flowlib.build(name), flowlib.Spec(**{**SIZES, "head_dim": dim, "group_size": group}))
        assert stage_of(plan) is None


def test_queries_that_pages_need_as_they_are_are_not_reduced_before():
    assert stage_of(agree(OfQueries(ops.Mean(dim=1), first=ops.Add()))) is None


@pytest.mark.parametrize(
    "name", ["centered_block_sparse_attention", "running_avg_block_sparse_attention", "lserve_sparse_attention"]
)
def test_flows_agree_with_their_oracles(name):
    """A segment op, state, two fields of two rows per page; large groups, a row without tokens."""
    report = verify_flow(name, cases=[Case("100 heads of 96", flowlib.Spec(**SIZES), LENGTHS)])
    assert report.ok, str(report)
    assert not report.notes
    plan = flowlib.profile(flowlib.build(name), flowlib.Spec(**SIZES))
    assert stage_of(plan) is plan.program.step_stages[0]


def test_an_update_is_joined_with_the_rows():
    plan = flowlib.profile(flowlib.build("quest_sparse_attention"), flowlib.Spec(**SIZES))
    assert joined_name(plan.program.stages) == "rows_and_update"
    made, done = scene(plan, LENGTHS, seed=0), []
    last = made.batch.page_table.gather(1, (made.batch.seq_lens.clamp(min=1)[:, None].long() - 1) // 16)[:, 0].long()
    loc = torch.where(made.batch.seq_lens > 0, last * 16 + (made.batch.seq_lens.long() - 1) % 16, -1)
    for joined in (True, False):
        pool = made.pool_by("triton").clone()
        for field in pool.fields.values():
            field[last[2]] = 1  # the page that the row of 48 tokens finishes
        out = plan.allocate(3, made.batch.width, "cpu")
        if not joined:
            plan.update(pool, loc, impl="triton")
        plan.launch(made.q, pool, made.batch, out, loc if joined else None)
        done.append((out, pool.fields))
    (out, fields), (want, want_fields) = done
    assert torch.equal(out.pages, want.pages)
    assert torch.equal(out.o[[0, 2]], want.o[[0, 2]])
    for name, field in fields.items():
        assert torch.equal(field[last[2]], want_fields[name][last[2]])
        assert not (field[last[2]] == 1).all()
