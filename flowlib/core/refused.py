"""Names of the public flow language that flowlib refuses: a file may import them, but not use them."""

from __future__ import annotations

from collections.abc import Callable

from flowlib.core.errors import FlowDefinitionError, located, user_line

REFUSED = {
    "Parameter": "learned parameters are not supported: a field is a function of its page's K and V, or state",
    "LearnedQuery": "learned parameters are not supported: the query is the model's own",
}


def refused(name: str) -> Callable[..., object]:
    """A stand-in that raises FlowDefinitionError, with the user's line, when it is called."""

    def call(*args: object, **kwargs: object) -> object:
        raise located(FlowDefinitionError(f"{name}: {REFUSED[name]}"), user_line())

    return call
