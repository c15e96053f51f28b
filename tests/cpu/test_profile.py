"""Profile mode: every flow, every geometry, without data, device or Triton."""

import pytest
import torch

import flowlib
from flowlib.compiler.program import SelectStage, TileStage
from flowlib.errors import OptionError
from tests.processes import python
from tests.refusals import refused

FLOWS = flowlib.list_flows(mla=False)
GROUPS, PAGE_SIZES, HEAD_DIMS = (1, 3, 4, 7, 8), (1, 16, 64), (64, 96, 128)


def profiled(name: str, **sizes: object) -> flowlib.Plan:
    """The plan, or a skip where the flow itself refuses the page size."""
    try:
        return flowlib.profile(flowlib.build(name), flowlib.Spec(**sizes))
    except OptionError as error:
        if "page_size" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("group_size", GROUPS)
@pytest.mark.parametrize("name", FLOWS)
def test_every_flow_profiles(name, group_size, page_size, head_dim):
    plan = profiled(name, group_size=group_size, page_size=page_size, head_dim=head_dim, max_pages=97)
    spec, stages, buffers = plan.spec, plan.program.stages, plan.program.buffers

    assert plan.max_selected == min(spec.max_pages, plan.program.selection.op.budget(spec, 97) + spec.bos + spec.eos)
    assert plan.lanes in (1, group_size)
    assert plan.field_bytes_per_page == spec.num_kv_heads * sum(f.nbytes for f in plan.fields.values())
    given = {"k": (page_size, head_dim), "v": (page_size, head_dim)}
    assert plan.flow.get_cache_meta_info(page_size, head_dim) == given | {n: f.shape for n, f in plan.fields.items()}
    assert isinstance(stages[-1], SelectStage), "the selection comes last"
    assert (plan.program.update is not None) == bool(plan.fields), "fields are written on KV writes"

    # Whatever a stage reads was written by an earlier one, and every buffer is used.
    written, read = set(), set()
    for stage in stages:
        sources = _reads(stage) & set(buffers)
        assert sources <= written, f"{stage.name} reads {sources - written} before they are written"
        read |= sources
        written |= _writes(stage)
    assert read == set(buffers)
    assert set(plan.fields) <= written


@pytest.mark.parametrize("name", [n for n in FLOWS if flowlib.build(n).default_page_size == 1])
def test_a_flow_of_single_tokens_refuses_other_pages(name):
    with refused(OptionError, f"{name}: page_size is 16, expected 1"):
        flowlib.profile(flowlib.build(name), flowlib.Spec(page_size=16))


@pytest.mark.parametrize("name", FLOWS)
def test_a_plan_prints_its_fields_stages_buffers_and_bytes(name):
    plan = profiled(name, group_size=3, page_size=16, head_dim=96, max_pages=50, max_batch=3)
    text = str(plan)
    for field in plan.fields.values():
        assert any(line.split()[:2] == [field.name, field.kind] for line in text.splitlines())
    for stage in (*plan.program.stages, "attend"):
        label = "select" if isinstance(stage, SelectStage) else getattr(stage, "name", stage)
        assert any(line.split()[:1] == [label] for line in text.splitlines())
    rows, buffers = 3 * plan.spec.num_kv_heads, plan.program.buffers.values()
    total = sum(4 * rows * (50 if b.paged else 1) * b.shape[0] * b.shape[1] for b in buffers)
    assert f"buffers ({total} bytes" in text
    assert f"({plan.field_bytes_per_page} bytes per page and layer" in text
    assert f"at most {plan.max_selected} of 50 pages attended" in text


@pytest.mark.parametrize("name", FLOWS)
def test_the_same_flow_and_spec_give_the_same_source(name):
    first, second = (profiled(name, head_dim=96, group_size=7) for _ in range(2))
    assert first.program.source == second.program.source
    compile(first.program.source, "generated", "exec")


def test_profiling_leaves_the_flow_as_it_was():
    flow = flowlib.build("gqa_block_sparse_attention")
    plans = [flowlib.profile(flow, flowlib.Spec(head_dim=d)) for d in (64, 256)]
    assert [plan.flow.softmax.scale for plan in plans] == [1 / 8, 1 / 16], "the scale of each spec, in the plan's copy"
    assert flow.softmax.scale is None


@pytest.mark.parametrize(
    ("dtype", "nbytes"), [(torch.bfloat16, 2), (torch.float16, 2), (torch.float32, 4), (torch.float8_e4m3fn, 2)]
)
def test_a_field_is_stored_like_the_pool_and_in_bfloat16_beside_float8(dtype, nbytes):
    plan = profiled("gqa_quest_sparse_attention", kv_dtype=dtype, head_dim=96, num_kv_heads=3)
    assert plan.field_bytes_per_page == 2 * 3 * 96 * nbytes
    assert plan.state_fields == ()


def test_the_indexer_alone_says_what_it_reads():
    read = flowlib.build("gqa_quest_sparse_attention").run_indexer_virtual(group_size=3, page_size=16, head_dim=96)
    assert read == 2 * 96 * 2, "two bfloat16 fields of one row"
    assert flowlib.build("streaming_attention").run_indexer_virtual(group_size=3, page_size=16, head_dim=96) == 0


@pytest.mark.parametrize(
    ("changes", "selected"),
    [({"top_k": 8}, 10), ({"top_k": 0}, 2), ({"top_k": 900}, 100), ({"top_k": 3, "top_k_ratio": 0.25}, 27),
     ({"top_k": 3, "bos": 4, "eos": 2}, 9), ({"top_k": 3, "dense_below": 300}, 19)],
    ids=str,
)  # fmt: skip
def test_the_widest_page_list_follows_the_budget(changes, selected):
    assert profiled("block_sparse_attention", max_pages=100, page_size=16, **changes).max_selected == selected


def test_no_triton_is_imported():
    code = (
        "import sys, flowlib\n"
        "for name in flowlib.list_flows():\n"
        "    flow = flowlib.build(name)\n"
        "    print(flowlib.profile(flow, flow.default_spec()))\n"
        "assert not any(m.split('.')[0] in ('triton', 'sglang') for m in sys.modules), sorted(sys.modules)\n"
    )
    *shown, count = python("-c", code + "print(len(flowlib.list_flows()))\n").strip().split("\n")
    assert "\n".join(shown).count("generated module:") == int(count) > 0


def _reads(stage) -> set[str]:
    if isinstance(stage, TileStage):
        return {leaf.name for output in stage.outputs for leaf in _leaves(output.node)}
    source = stage.scores if isinstance(stage, SelectStage) else stage.sources[0]
    return {source} - {None}


def _writes(stage) -> set[str]:
    if isinstance(stage, TileStage):
        return {output.name for output in stage.outputs}
    return set() if isinstance(stage, SelectStage) else {stage.target}


def _leaves(node):
    if not node.inputs:
        yield node
    for source in node.inputs:
        yield from _leaves(source)
