"""A step that updates the pages its tokens finish: one kernel runs `update` and the first stage of scoring."""

import pytest
import torch

import flowlib
from flowlib.core.flow import vFlow

JOINED = (
    "gqa_quest_sparse_attention", "gqa_h2o_sparse_attention", "block_sparse_attention", "lserve_sparse_attention",
    "twilight_attention",
)  # fmt: skip
APART = ("running_avg_block_sparse_attention",)
LENGTHS = (64, 1, 100, 0, 128, 17)
PAGE, WIDTH, HEADS = 16, 8, 3


class World:
    """A pool whose last finished pages have stale fields, and a step that finishes them."""

    def __init__(self, flow: str | vFlow, device: str, float8: bool = False, top_k: int = 2, rows: int = len(LENGTHS)):
        spec = flowlib.Spec(
            page_size=PAGE, head_dim=48, group_size=2, num_kv_heads=HEADS, top_k=top_k, max_pages=WIDTH, max_batch=rows,
            summary_dtype=torch.float8_e4m3fn if float8 else None,
        )  # fmt: skip
        self.plan = flowlib.profile(flowlib.build(flow) if isinstance(flow, str) else flow, spec)
        generator = torch.Generator().manual_seed(3)
        tokens = rows * WIDTH * PAGE
        self.pool = flowlib.PagedPool(self.plan, rows * WIDTH, device)
        k, v = (torch.randn(tokens, HEADS, 48, generator=generator).bfloat16().to(device) for _ in "kv")
        self.pool.write(k, v, torch.arange(tokens, device=device))
        table = torch.randperm(rows * WIDTH, generator=generator).view(rows, WIDTH)
        lengths = torch.tensor(LENGTHS[:rows])
        last = table.gather(1, (lengths.clamp(min=1)[:, None] - 1) // PAGE)[:, 0]
        self.finished = last[(lengths > 0) & (lengths % PAGE == 0)]
        self.loc = torch.where(lengths > 0, last * PAGE + (lengths - 1) % PAGE, -1).to(device)
        for field in self.pool.fields.values():
            field[self.finished.to(device)] = 1
        self.batch = flowlib.Batch(table.int().to(device), lengths.int().to(device))
        self.q = torch.randn(rows, 2 * HEADS, 48, generator=generator).bfloat16().to(device)

    def step(self, joined: bool) -> tuple[flowlib.PagedPool, object]:
        """The pool and the output after the step, `update` in a launch of its own or not."""
        pool, out = self.pool.clone(), self.plan.allocate(len(self.loc), WIDTH, self.q.device)
        if joined:
            self.plan.launch(self.q, pool, self.batch, out, self.loc)
        else:
            self.plan.update(pool, self.loc, impl="triton")
            self.plan.launch(self.q, pool, self.batch, out)
        return pool, out


@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize("name", JOINED)
def test_one_launch_is_update_and_step(name, float8, device):
    world = World(name, device, float8)
    assert world.plan._executor.joined is not None
    same(world, *world.step(joined=True), *world.step(joined=False))


@pytest.mark.parametrize("name", APART)
def test_flows_with_state_are_updated_first(name, device):
    world = World(name, device)
    assert world.plan._executor.joined is None
    same(world, *world.step(joined=True), *world.step(joined=False))


def test_a_table_of_short_rows_is_attended_in_full_and_its_pages_are_updated(device):
    world = World("gqa_quest_sparse_attention", device, top_k=WIDTH)
    assert world.plan.full_pages == WIDTH
    pool, out = world.step(joined=True)
    same(world, pool, out, *world.step(joined=False))
    exact = flowlib.dense(world.q, pool, world.batch, impl="triton")
    torch.testing.assert_close(out.o, exact.o)
    for row, length in enumerate(LENGTHS):
        pages = -(-length // PAGE)
        want = [*range(pages), *[-1] * (out.pages.shape[-1] - pages)]
        assert out.pages[row].tolist() == [want] * HEADS
        assert out.lengths[row].tolist() == [pages] * HEADS
    assert out.scores.isnan().all()


def same(world, pool, out, want_pool, want) -> None:
    assert torch.equal(out.o, want.o)
    assert torch.equal(out.pages, want.pages)
    assert torch.equal(out.lengths, want.lengths)
    for name, field in want_pool.fields.items():
        assert torch.equal(pool.fields[name].view(torch.uint8), field.view(torch.uint8)), name
        stale = world.pool.fields[name].view(torch.uint8)[world.finished.to(field.device)]
        assert not torch.equal(field.view(torch.uint8)[world.finished.to(field.device)], stale), "pages were finished"
