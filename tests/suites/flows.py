"""Every flow: reference in float64 and Triton against its independent oracle, stage by stage."""

import pytest

from flowlib.testing import has_oracle, verify_flow
from tests.suites.flow_cases import CASES, FLOWS


@pytest.mark.parametrize("name", FLOWS)
def test_every_flow_has_an_independent_oracle(name):
    assert has_oracle(name), "write it in flowlib/testing/oracles"


@pytest.mark.parametrize("case", CASES, ids=[c.label for c in CASES])
@pytest.mark.parametrize("name", FLOWS)
def test_flow_agrees_with_its_oracle(name, case, device):
    """Fields, scores, the selection by the scores it picked, o and lse."""
    report = verify_flow(name, cases=[case], device=device)
    print(report)
    assert report.ok, str(report)
    assert report.oracle == "independent"
    assert {r.impl for r in report.results} == {"reference", "triton"}
    assert report.attended["triton"] == report.attended["reference"]
    skipped = report.cached["triton"] - report.attended["triton"]
    assert skipped > 0 or case.spec.dense_below, "the budget leaves pages out"
