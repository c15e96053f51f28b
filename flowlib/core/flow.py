"""vFlow: the base class of every method."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from flowlib.core.attention import Normaliser, Softmax
from flowlib.core.context import ContextBase
from flowlib.core.errors import FlowDefinitionError, FormatError, OptionError, located
from flowlib.core.formats import FORMAT, Mode, Side
from flowlib.core.spec import Spec
from flowlib.core.trace import declared_fields, given_fields, method_line, trace
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
    default_sizes: ClassVar[Mapping[str, Any]] = {}
    """Numbers of the spec where none is given."""
    attention: Normaliser = Softmax()
    """What the scores of attention become weights by; see :mod:`flowlib.attention`."""

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

    def adapt(self, spec: Spec) -> Spec:
        """The spec the flow runs for, where one of its options decides what another number of the spec says."""
        return spec

    def declare(self, spec: Spec) -> object:
        """What :meth:`create_cache` returns for `spec`. Raises OptionError if K and V of the spec are one latent."""
        if spec.is_mla:
            raise OptionError(
                f"{self.flow_name or type(self).__name__}: kv_lora_rank is {spec.kv_lora_rank}, expected None: the "
                "flow reads separate K and V; a flow over the latent is a vFlowMLA, such as rope_aware_block_sparse_mla"
            )
        return _declaration(self, page_size=spec.page_size, head_dim=spec.head_dim)

    def default_spec(self, **numbers: Any) -> Spec:
        """The spec of some numbers; the others are the flow's own defaults, or those of :class:`flowlib.Spec`."""
        return Spec(**{"page_size": self.default_page_size, **self.default_sizes, **numbers})

    def check_spec(self, spec: Spec) -> None:
        """Raises OptionError if the flow can't run with `spec`; called before anything is profiled."""

    def get_cache_meta_info(self, page_size: int, head_dim: int) -> dict[str, tuple[int, int]]:
        """Inner sizes of every field, ``k`` and ``v`` among them."""
        return _shapes(self, Spec(page_size=page_size, head_dim=head_dim))

    def run_indexer_virtual(
        self, group_size: int, page_size: int, head_dim: int, summary_dtype: torch.dtype | None = None
    ) -> int:
        """Profiles the indexer alone, without a device; `summary_dtype` as in :class:`flowlib.Spec`.

        Returns:
            Bytes read per scored page and kv head.
        """
        return _bytes_scored(
            self, Spec(page_size=page_size, head_dim=head_dim, group_size=group_size, summary_dtype=summary_dtype)
        )


class vFlowMLA(vFlow):
    """A sparse-attention method over the latents of multi-head latent attention (MLA).

    One given field in place of ``k`` and ``v``: ``latent`` ``[page_size, kv_lora_rank + qk_rope_head_dim]``, content
    and rope channels of each token. q is BATCHED ``[B, H_q, kv_lora_rank + qk_rope_head_dim]``, the absorbed queries:
    their dot products with a latent are the logits before the scale. It needs a spec with ``kv_lora_rank``; the default
    one has the sizes of DeepSeek-V2-Lite.
    """

    default_sizes: ClassVar[Mapping[str, Any]] = {
        "kv_lora_rank": 512, "head_dim": 576, "num_kv_heads": 1, "group_size": 16, "scale": 192**-0.5
    }  # fmt: skip

    def create_cache(self, page_size: int, kv_lora_rank: int, qk_rope_head_dim: int) -> dict[str, tuple[Any, ...]]:  # type: ignore[override]
        """Field name to ``(r, c)`` or ``(r, c, dtype)``, the sizes of one page's entry."""
        return {}

    def declare(self, spec: Spec) -> object:
        if spec.kv_lora_rank is None:
            raise OptionError(
                f"{self.flow_name or type(self).__name__}: kv_lora_rank is None, expected the content channels of an "
                "MLA latent: Spec(kv_lora_rank=512, head_dim=576, num_kv_heads=1, group_size=heads, scale=...)"
            )
        rank = spec.kv_lora_rank
        return _declaration(self, page_size=spec.page_size, kv_lora_rank=rank, qk_rope_head_dim=spec.head_dim - rank)

    def get_cache_meta_info(  # type: ignore[override]
        self, page_size: int, kv_lora_rank: int, qk_rope_head_dim: int
    ) -> dict[str, tuple[int, int]]:
        """Inner sizes of every field, ``latent`` among them."""
        return _shapes(self, _latent_spec(page_size, kv_lora_rank, qk_rope_head_dim))

    def run_indexer_virtual(  # type: ignore[override]
        self,
        group_size: int,
        page_size: int,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        summary_dtype: torch.dtype | None = None,
    ) -> int:
        """As of :class:`vFlow`; `group_size` is the number of query heads."""
        spec = _latent_spec(page_size, kv_lora_rank, qk_rope_head_dim)
        return _bytes_scored(self, spec.replace(group_size=group_size, summary_dtype=summary_dtype))


def _declaration(flow: vFlow, **sizes: int) -> object:
    """What ``create_cache`` returns for `sizes`, in their order. Raises FlowDefinitionError where it takes others."""
    taken = inspect.signature(flow.create_cache)
    try:
        taken.bind(*sizes.values())
    except TypeError:
        kind = "vFlowMLA" if isinstance(flow, vFlowMLA) else "vFlow"
        error = FlowDefinitionError(f"create_cache: takes {taken}, expected ({', '.join(sizes)}) in a {kind}")
        raise located(error, method_line(flow.create_cache)) from None
    return flow.create_cache(*sizes.values())


def _latent_spec(page_size: int, kv_lora_rank: int, qk_rope_head_dim: int) -> Spec:
    size = kv_lora_rank + qk_rope_head_dim
    return Spec(page_size=page_size, head_dim=size, kv_lora_rank=kv_lora_rank, num_kv_heads=1, scale=1.0)


def _shapes(flow: vFlow, spec: Spec) -> dict[str, tuple[int, int]]:
    return {f.name: f.shape for f in (given_fields(spec) | declared_fields(copy.deepcopy(flow), spec)).values()}


def _bytes_scored(flow: vFlow, spec: Spec) -> int:
    traced = trace(flow, spec)
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
