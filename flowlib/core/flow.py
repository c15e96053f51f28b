"""vFlow: the base class of every method."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from flowlib.core.context import ContextBase
from flowlib.core.errors import FlowDefinitionError, FormatError
from flowlib.core.formats import FORMAT, Mode, Side
from flowlib.core.spec import Spec
from flowlib.core.trace import declared_fields, given_fields, trace
from flowlib.core.vtensor import SelectionHandle, vTensor


class vFlow:
    """A sparse-attention method.

    A subclass declares its fields in :meth:`create_cache`, fills them in :meth:`forward_cache` and scores pages in
    :meth:`forward_indexer`. Ops are attributes, options are arguments of ``__init__``. The bodies run in profile mode
    only; with a context of another mode the plan compiled for its spec runs instead.
    """

    default_page_size: ClassVar[int] = 16
    """Page size used where none is given."""
    flow_name: ClassVar[str] = ""
    """The name it is registered under."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "forward_cache" in cls.__dict__:
            cls.forward_cache = _runs_plan_cache(cls.forward_cache)
        if "forward_indexer" in cls.__dict__:
            cls.forward_indexer = _runs_plan_indexer(cls.forward_indexer)

    def create_cache(self, page_size: int, head_dim: int) -> dict[str, tuple[Any, ...]]:
        """Field name to ``(r, c)`` or ``(r, c, dtype)``, the sizes of one (page, kv head) entry."""
        return {}

    def forward_cache(self, cache: Mapping[str, vTensor], loc: torch.Tensor, ctx: ContextBase) -> None:
        """Fills the fields of the pages finished by the tokens at `loc`."""

    def forward_indexer(self, q: vTensor, o: SelectionHandle, cache: Mapping[str, vTensor], ctx: ContextBase) -> None:
        """Scores pages and ends in one op that writes `o`; q is BATCHED ``[B, G, head_dim]``."""
        raise FlowDefinitionError(f"{type(self).__name__} defines no forward_indexer")

    def check_spec(self, spec: Spec) -> None:
        """Raises OptionError if the flow can't run with `spec`; called before anything is profiled."""

    def get_cache_meta_info(self, page_size: int, head_dim: int) -> dict[str, tuple[int, int]]:
        """Inner sizes of every field, ``k`` and ``v`` among them."""
        spec = Spec(page_size=page_size, head_dim=head_dim)
        return {f.name: f.shape for f in (given_fields(spec) | declared_fields(copy.deepcopy(self), spec)).values()}

    def run_indexer_virtual(
        self, group_size: int, page_size: int, head_dim: int, summary_dtype: torch.dtype | None = None
    ) -> int:
        """Profiles the indexer alone, without a device; `summary_dtype` as in :class:`flowlib.Spec`.

        Returns:
            Bytes read per scored page and kv head.
        """
        spec = Spec(page_size=page_size, head_dim=head_dim, group_size=group_size, summary_dtype=summary_dtype)
        traced = trace(self, spec)
        paged = [leaf for leaf in traced.indexer.leaves() if leaf.format is FORMAT.PAGED]
        known = given_fields(spec) | traced.fields
        return sum(known[name].nbytes for name in {leaf.name for leaf in paged})


def _runs_plan_cache(body: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(body)
    def forward_cache(self: vFlow, cache: Mapping[str, vTensor], loc: torch.Tensor, ctx: ContextBase) -> None:
        _check_context(self, ctx, Side.CACHE)
        if ctx.mode is Mode.PROFILE:
            body(self, cache, loc, ctx)
        else:
            ctx.run_cache(self, cache, loc)

    return forward_cache


def _runs_plan_indexer(body: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(body)
    def forward_indexer(
        self: vFlow, q: vTensor, o: SelectionHandle, cache: Mapping[str, vTensor], ctx: ContextBase
    ) -> None:
        _check_context(self, ctx, Side.INDEXER)
        if ctx.mode is Mode.PROFILE:
            body(self, q, o, cache, ctx)
        else:
            ctx.run_indexer(self, q, o, cache)

    return forward_indexer


def _check_context(flow: vFlow, ctx: object, side: Side) -> None:
    if not isinstance(ctx, ContextBase):
        raise FormatError(
            f"{type(flow).__name__}.{side.value}: ctx is {type(ctx).__name__}, expected a flowlib context"
        )
