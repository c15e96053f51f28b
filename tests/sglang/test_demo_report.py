"""The demo's numbers, on logits and traces made by hand."""

import math
import sys

import numpy as np
import pytest

from tests.sglang.engine import HERE

sys.path.insert(0, str(HERE.parent.parent / "experiments"))

import demo_report


def line(cached, attended, pages, mass):
    layer = {"attended": [attended], "pages": [pages], "mass": [mass]}
    return {"cached": [cached], "trace_seconds": 0.5, "layers": {"0": layer, "1": layer}}


def made(name, logits, trace):
    return demo_report.Run(name, [1, 0, 1], np.array(logits, dtype=np.float32), 2, 3.0, trace)


@pytest.fixture
def runs():
    dense = made("dense", [[9, 0], [0, 0], [2, 0]], [])
    trace = [line(4, [2, 2], [[0, 3], [1, 3]], [0.5, 1.0]), line(5, [2, 2], [[0, 4], [0, 4]], [0.75, 0.75])]
    sparse = made("flow", [[0, 9], [math.log(3), 0], [0, 2]], trace)
    return dense, sparse


def test_closeness_leaves_the_first_token_out(runs):
    close = demo_report.compare(*runs)
    first = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    p = 1 / (1 + math.exp(-2))
    second = p * 2 + (1 - p) * -2
    assert close.kl == pytest.approx((first + second) / 2, abs=1e-6)
    assert close.agreement == 0.5
    assert (close.attended, close.cached) == (2 * (4 + 4), 2 * (2 * 4 + 2 * 5))
    assert close.mass == pytest.approx(0.75)


def test_speed_leaves_the_tracing_out(runs):
    dense, sparse = runs
    assert dense.tokens_per_second == pytest.approx(2 / 3.0)
    assert sparse.tokens_per_second == pytest.approx(2 / 2.0)


def test_other_tokens_than_the_dense_ones_are_an_error(runs):
    dense, sparse = runs
    other = demo_report.Run("flow", [1, 1, 1], sparse.logits, 2, 1.0, sparse.trace)
    with pytest.raises(RuntimeError, match="did not take the dense run's tokens"):
        demo_report.compare(dense, other)


def test_picture_shows_shares_and_leaves_missing_pages_empty(runs, tmp_path):
    shares = demo_report.page_shares(runs[1])
    assert shares[0].tolist()[:4] == [0.5, 0.5, 0.0, 1.0]
    assert math.isnan(shares[0][4])
    assert shares[1].tolist() == [1.0, 0.0, 0.0, 0.0, 1.0]
    demo_report.draw([runs[1]], tmp_path / "deep" / "demo.png")
    assert (tmp_path / "deep" / "demo.png").read_bytes().startswith(b"\x89PNG")
