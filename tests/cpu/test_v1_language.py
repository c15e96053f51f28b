"""Flow files in the style of vortex_torch's language run after the import lines of docs/migration.md are changed."""

import pytest
import torch

import flowlib
from flowlib.core import registry
from flowlib.testing import Case, oracle_of, scene, verify_flow
from tests.suites.same import IMPLEMENTATIONS
from tests.suites.v1_files import FILES, migrated

SPEC = flowlib.Spec(page_size=8, head_dim=24, v_head_dim=40, group_size=3, top_k=2, max_pages=14, max_batch=4)
LENGTHS = (93, 41, 0, 25)
STEPS = 3

flows = pytest.mark.parametrize("mine", FILES)


@pytest.fixture(autouse=True)
def registry_as_it_was(monkeypatch):
    monkeypatch.setattr(registry, "_FLOWS", dict(registry._FLOWS))
    monkeypatch.setattr(registry, "_ALIASES", dict(registry._ALIASES))


@pytest.fixture
def path(mine, tmp_path):
    file = tmp_path / f"{mine}.py"
    file.write_text(migrated(FILES[mine].text))
    return file


@flows
def test_nothing_but_the_imports_changed(mine, path):
    before, after = FILES[mine].text.splitlines(), path.read_text().splitlines()
    changed = [line for line, new in zip(before, after, strict=True) if line != new]
    assert changed
    assert all(line.startswith("from vortex_torch") for line in changed)
    assert "vortex_torch" not in path.read_text()


@flows
def test_it_profiles(mine, path):
    plan = flowlib.profile(flowlib.build(mine, module_path=path), SPEC)
    twin = flowlib.profile(flowlib.build(FILES[mine].built_in), SPEC)
    assert {n: (f.shape, f.dtype, f.kind) for n, f in plan.fields.items()} == {
        n: (f.shape, f.dtype, f.kind) for n, f in twin.fields.items()
    }
    assert plan.max_selected == twin.max_selected


@flows
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_it_gives_what_the_built_in_flow_gives(mine, path, impl):
    """The same pages and the same numbers in every bit of float64, and to a rounding of fp32 by Triton; over steps."""
    outputs = []
    for flow in (flowlib.build(mine, module_path=path), flowlib.build(FILES[mine].built_in, **FILES[mine].options)):
        plan = flowlib.profile(flow, SPEC)
        made = scene(plan, LENGTHS)
        store, steps = made.pool_by(impl), []
        for i in range(STEPS):
            dtype = torch.float64 if impl == "reference" else None
            steps.append(plan.step(made.q.roll(i, 0), store, made.batch, impl=impl, dtype=dtype))
        outputs.append((steps, store))
    for mine_out, twin_out in zip(outputs[0][0], outputs[1][0], strict=True):
        assert torch.equal(mine_out.pages, twin_out.pages)
        assert torch.equal(mine_out.lengths, twin_out.lengths)
        torch.testing.assert_close(mine_out.o, twin_out.o, rtol=0, atol=0)
        torch.testing.assert_close(mine_out.lse, twin_out.lse, rtol=0, atol=0)
        torch.testing.assert_close(mine_out.scores, twin_out.scores, rtol=1e-6, atol=1e-6, equal_nan=True)
    for name, field in outputs[0][1].fields.items():
        torch.testing.assert_close(field, outputs[1][1].fields[name], equal_nan=True)


@flows
def test_reference_and_triton_agree_with_the_built_in_flows_oracle(mine, path):
    oracle = oracle_of(FILES[mine].built_in, **FILES[mine].options)
    report = verify_flow(mine, module_path=path, oracle=oracle, cases=[Case("small", SPEC, LENGTHS)])
    assert report.ok, str(report)
    assert report.oracle == "given"


@flows
def test_it_needs_no_op_to_be_made_twice(mine, path):
    """Ops are values here: a file that makes an op for every call compiles to as many kernels."""
    plan = flowlib.profile(flowlib.build(mine, module_path=path), SPEC)
    twin = flowlib.profile(flowlib.build(FILES[mine].built_in, **FILES[mine].options), SPEC)
    assert len(plan.program.stages) == len(twin.program.stages)
