"""What an oracle is, and oracles by the name of their flow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from flowlib.core import registry
from flowlib.core.errors import OptionError, did_you_mean
from flowlib.core.spec import Spec

Pages = Mapping[str, torch.Tensor]
"""Pages of one row by name: ``k`` ``[n, page_size, D]``, ``v`` ``[n, page_size, Dv]``, each field ``[n, r, c]``, and
what is in :data:`ABOUT_ROW`. With MLA, ``k`` is the latents and ``v`` their content."""

ABOUT_ROW = ("position", "query_position", "alibi_slopes", "tail_maximum")
"""``position`` ``[n, 1, 1]``, the pages' logical index; of the row: ``query_position`` ``[1]``, ``alibi_slopes``
``[G]`` (0 where the spec has none) and ``tail_maximum`` ``[G]``, the largest attention score in its last page."""

OracleType = TypeVar("OracleType", bound="type[Oracle]")
_ORACLES: dict[str, type[Oracle]] = {}


class Oracle:
    """A flow written a second time, from its formula, for one kv head of one request.

    Methods take and return torch tensors of one floating dtype and are right in float64; they know nothing of page
    tables, physical pages or batches. A flow's options are arguments of ``__init__``, under the flow's names.
    """

    def fields(self, k: torch.Tensor, v: torch.Tensor, spec: Spec) -> dict[str, torch.Tensor]:
        """Fields of n finished pages: name to ``[n, r, c]``.

        Args:
            k: ``[n, page_size, D]``, de-scaled; with MLA, the latents.
            v: ``[n, page_size, Dv]``, de-scaled.
            spec: the numbers the flow runs for.
        """
        return {}

    def scores(self, q: torch.Tensor, pages: Pages, spec: Spec) -> torch.Tensor | None:
        """Scores of the n >= 1 scored pages of a row, in their order.

        Args:
            q: ``[G, D]``.
            pages: see :data:`Pages`.
            spec: the numbers the flow runs for.

        Returns:
            ``[1, n]``, ``[G, n]`` for a selection per query head, or ``None`` where the flow scores nothing.
        """
        raise NotImplementedError(f"{type(self).__name__}.scores")

    def state(self, q: torch.Tensor, pages: Pages, spec: Spec) -> dict[str, torch.Tensor]:
        """State fields of the scored pages after the step: name to ``[n, r, c]``."""
        return {}

    def kept(self, scores: torch.Tensor, spec: Spec, slack: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
        """Which of one lane's scores ``[n]`` the flow keeps; it turns the others into -inf before it chooses.

        Returns:
            Two masks ``[n]``: kept surely, and kept perhaps, given that each score is known to within `slack`.
        """
        everything = torch.ones(scores.shape, dtype=torch.bool)
        return everything, everything

    def counts(self, scores: torch.Tensor, num_pages: int, spec: Spec) -> tuple[int, int]:
        """Fewest and most pages that may be chosen of one lane's scores ``[n]``.

        The budget of a row of S = `num_pages` pages is ``max(top_k, floor(S · round(top_k_ratio · 65536) / 65536))``;
        -inf and NaN are never chosen.
        """
        budget = max(spec.top_k, num_pages * round(spec.top_k_ratio * 65536) // 65536)
        eligible = sum(1 for s in scores.tolist() if s > float("-inf"))
        return min(budget, eligible), min(budget, eligible)


def oracle(*names: str) -> Callable[[OracleType], OracleType]:
    """Class decorator: the oracle of the flows registered under `names`."""

    def record(oracle_type: OracleType) -> OracleType:
        _ORACLES.update(dict.fromkeys(names, oracle_type))
        return oracle_type

    return record


def has_oracle(name: str) -> bool:
    """Whether a flow has an oracle, by its name or an alias."""
    return _canonical(name) in _ORACLES


def oracle_of(name: str, **options: object) -> Oracle:
    """The oracle of a flow.

    Args:
        name: the flow's registered name, or an alias once the flow is registered.
        options: the flow's options.

    Raises:
        OptionError: the flow has no oracle, or the oracle does not know an option.
    """
    oracle_type = _ORACLES.get(_canonical(name))
    if oracle_type is None:
        known = ", ".join(sorted(_ORACLES))
        raise OptionError(f"flow {name!r} has no oracle.{did_you_mean(name, _ORACLES)} Flows with one: {known}")
    try:
        return oracle_type(**options)
    except TypeError as error:
        raise OptionError(f"the oracle of {name!r} does not take the options {sorted(options)}: {error}") from error


def _canonical(name: str) -> str:
    return next((known for known in registry.registered() if name in registry.aliases_of(known)), name)
