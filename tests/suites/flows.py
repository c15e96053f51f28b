"""Every flow: reference in float64 and Triton against its independent oracle, stage by stage."""

import pytest

from flowlib.testing import has_oracle, verify_flow
from tests.suites.flow_cases import FLOWS, cases_of, plan_for


@pytest.mark.parametrize("name", FLOWS)
def test_every_flow_has_an_independent_oracle(name):
    assert has_oracle(name), "write it in flowlib/testing/oracles"


@pytest.mark.parametrize(
    ("name", "case"), [pytest.param(n, c, id=f"{n}-{c.label}") for n in FLOWS for c in cases_of(n)]
)
def test_flow_agrees_with_its_oracle(name, case, device):
    """Fields, scores, the selection by the scores it picked, o and lse."""
    report = verify_flow(name, cases=[case], device=device)
    print(report)
    assert report.ok, str(report)
    assert report.oracle == "independent"
    assert {r.impl for r in report.results} == {"reference", "triton"}
    assert report.attended["triton"] == report.attended["reference"]
    plan = plan_for(name, case.spec)
    bounded = plan.max_selected < plan.spec.max_pages and not plan.spec.dense_below
    assert report.cached["triton"] > report.attended["triton"] or not bounded, "the budget leaves pages out"
