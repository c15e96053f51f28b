"""Refuses flows that are not well formed, before anything is generated."""

from __future__ import annotations

from collections.abc import Sequence

from flowlib.core.attention import Softmax, check_normaliser
from flowlib.core.errors import FlowDefinitionError, OptionError, SourceLine, located
from flowlib.core.flow import vFlowMLA
from flowlib.core.spec import Spec
from flowlib.core.trace import GIVEN, Traced, method_line


def verify(traced: Traced) -> None:
    """Checks fields against both graphs.

    Raises:
        FlowDefinitionError: a field nobody writes or nobody reads, or a state field without a reset; with the line of
            the Save or of the declaration.
    """
    flow = type(traced.flow).__name__
    given = "'latent'" if isinstance(traced.flow, vFlowMLA) else "'k' and 'v'"
    read = {leaf.name for leaf in traced.indexer.leaves()}
    for name in traced.fields:
        problem = _problem(name, set(traced.cache.stores), read, set(traced.indexer.stores), given)
        if problem:
            raise located(FlowDefinitionError(f"{flow}: {problem}"), _line_of(traced, name))
    unknown = read - set(traced.fields) - {*GIVEN, "q"}
    if unknown:
        raise FlowDefinitionError(f"{flow}: forward_indexer reads {sorted(unknown)}, which no field of this flow is")


def _problem(name: str, written: set[str], read: set[str], saved: set[str], given: str) -> str:
    if name not in written and name in saved:
        return (
            f"state field {name!r} has no reset: a page that is reused would show its last owner's state; "
            f"add Fill to forward_cache: self.fill(cache[{name!r}], loc=loc, ctx=ctx)"
        )
    if name not in written:
        return f"field {name!r} is never written: forward_cache must compute it from {given}"
    if name not in read and name not in saved:
        return f"field {name!r} is never read by forward_indexer: read it, or remove it from create_cache"
    return ""


def _line_of(traced: Traced, name: str) -> SourceLine | None:
    """Where a field is saved, else where it is declared."""
    saved = traced.indexer.stores.get(name)
    where = None if saved is None else saved.where
    return where or method_line(traced.flow.create_cache, name)


def check_attention(traced: Traced, spec: Spec) -> None:
    """Checks the flow's normaliser, and that it takes what ``forward_indexer`` tells it.

    Raises:
        FlowDefinitionError: `attention` is no normaliser, or has no use for a hint, or lacks one.
        OptionError: the spec's attention can't have it.
    """
    flow = type(traced.flow).__name__
    attention = check_normaliser(flow, traced.flow.attention)
    hints = traced.indexer.hints
    if isinstance(attention, Softmax):
        for name, node in hints.items():
            raise located(FlowDefinitionError(f"{flow}: attention is softmax, which takes no {name}"), node.where)
        return
    if spec.is_mla:
        raise OptionError(f"{flow}: attention is {attention}, expected softmax for a flow over MLA's latent")
    if attention.tau_mode != "exact" and "estimate" not in hints:
        raise FlowDefinitionError(
            f"{flow}: attention is {attention}, and forward_indexer gives no estimate: add TauEstimate()(tau, o)"
        )


def check_state(traced: Traced, spec: Spec) -> None:
    """Raises OptionError where a spec asks for what a flow with state can't do."""
    state = [f.name for f in traced.fields.values() if f.kind == "state"]
    if state and spec.dense_below:
        error = OptionError(
            f"{type(traced.flow).__name__}: dense_below is {spec.dense_below}, expected 0 for a flow with state "
            f"({', '.join(state)}): every step must score its row"
        )
        raise located(error, _line_of(traced, state[0]))


def refuse_shared_state(flow: str, state_fields: Sequence[str]) -> None:
    """Raises OptionError if a flow with state would share pages between requests (a prefix cache)."""
    if state_fields:
        fields = ", ".join(repr(f) for f in state_fields)
        raise OptionError(
            f"flow {flow!r} keeps state per request in {fields}, and the radix cache shares pages between requests: "
            "add --disable-radix-cache"
        )
