"""Refuses flows that are not well formed, before anything is generated."""

from __future__ import annotations

from flowlib.core.errors import FlowDefinitionError, OptionError
from flowlib.core.spec import Spec
from flowlib.core.trace import GIVEN, Traced


def verify(traced: Traced) -> None:
    """Checks fields against both graphs.

    Raises:
        FlowDefinitionError: a field nobody writes or nobody reads, or a state field without a reset.
    """
    flow = type(traced.flow).__name__
    written = set(traced.cache.stores)
    read = {leaf.name for leaf in traced.indexer.leaves()}
    saved = set(traced.indexer.stores)
    for name in traced.fields:
        if name not in written and name in saved:
            raise FlowDefinitionError(
                f"{flow}: state field {name!r} has no reset: a page that is reused would show its last owner's state; "
                f"add Fill to forward_cache: self.fill(cache[{name!r}], loc=loc, ctx=ctx)"
            )
        if name not in written:
            raise FlowDefinitionError(
                f"{flow}: field {name!r} is never written: forward_cache must compute it from 'k' and 'v'"
            )
        if name not in read and name not in saved:
            raise FlowDefinitionError(
                f"{flow}: field {name!r} is never read by forward_indexer: read it, or remove it from create_cache"
            )
    unknown = read - set(traced.fields) - {*GIVEN, "q"}
    if unknown:
        raise FlowDefinitionError(f"{flow}: forward_indexer reads {sorted(unknown)}, which no field of this flow is")


def check_state(traced: Traced, spec: Spec) -> None:
    """Raises OptionError where a spec asks for what a flow with state can't do."""
    state = [f.name for f in traced.fields.values() if f.kind == "state"]
    if state and spec.dense_below:
        raise OptionError(
            f"{type(traced.flow).__name__}: dense_below is {spec.dense_below}, expected 0 for a flow with state "
            f"({', '.join(state)}): every step must score its row"
        )
