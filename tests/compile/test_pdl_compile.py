"""Where kernels wait for the kernels before them and let the next one start, read from their PTX."""

import pytest
import torch

import flowlib
from flowlib.runtime import execute, interpreter
from flowlib.testing.compile_only import compile_only
from tests.compile.test_flows_compile import plan_for

pytestmark = pytest.mark.skipif(
    interpreter.requested() or interpreter.active(), reason="TRITON_INTERPRET is set: compile in a process of its own"
)
WAIT, RELEASE = "griddepcontrol.wait", "griddepcontrol.launch_dependents"


@pytest.fixture
def pdl(monkeypatch):
    """As on a GPU that has programmatic dependent launch."""
    monkeypatch.setattr(execute, "has_pdl", lambda device: True)


def compiled(width: int, name: str = "gqa_quest_sparse_attention") -> dict[str, list[str]]:
    """The instructions, by kernel, of a step that updates the pages its tokens finish."""
    plan = plan_for(name, group_size=4, head_dim=128, page_size=16)
    pool = flowlib.PagedPool(plan, num_pages=4)
    batch = flowlib.Batch(torch.zeros(2, width, dtype=torch.int32), torch.zeros(2, dtype=torch.int32))
    q = torch.zeros(2, plan.spec.num_heads, plan.spec.head_dim, dtype=plan.spec.field_dtype)
    with compile_only("sm_90") as kernels:
        plan.launch(q, pool, batch, plan.allocate(2, width, "cpu"), torch.zeros(2, dtype=torch.int64))
    return {kernel.name: kernel.ptx.splitlines() for kernel in kernels}


def places(lines: list[str], *words: str) -> list[int]:
    return [i for i, line in enumerate(lines) if any(word in line for word in words)]


def test_short_rows_are_attended_while_their_pages_are_updated(pdl):
    """The update reads after it has waited and released; attention waits once all its own stores are made."""
    found = compiled(width=8)
    assert list(found) == ["update", "attend_kernel"]
    update, attend = found["update"], found["attend_kernel"]
    wait, release = places(update, WAIT), places(update, RELEASE)
    assert len(wait) == len(release) == 1
    assert wait[0] < release[0] < min(places(update, "ld.global", "st.global", "cp.async"))
    assert places(attend, RELEASE) == []
    assert len(places(attend, WAIT)) == 1
    assert places(attend, WAIT)[0] > max(places(attend, "ld.global", "st.global", "cp.async", "atom."))


def test_a_step_waits_in_each_kernel_and_releases_in_none(pdl):
    found = compiled(width=1024)
    assert len(found) == 3, "scoring with the update, selection, attention"
    for name, lines in found.items():
        assert len(places(lines, WAIT)) == 1, name
        assert places(lines, RELEASE) == [], name
        assert places(lines, WAIT)[0] < min(places(lines, "st.global", "atom.")), name
