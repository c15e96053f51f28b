"""The suite of every flow, on a GPU; see tests/suites/flows.py."""

from tests.suites.flows import (  # noqa: F401
    test_every_flow_has_an_independent_oracle,
    test_flow_agrees_with_its_oracle,
)
