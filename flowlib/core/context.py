"""Contexts: what an op call needs to know beside its arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from flowlib.core.formats import FORMAT, Mode, Side
from flowlib.core.spec import Spec
from flowlib.core.vtensor import SelectionHandle, vTensor

if TYPE_CHECKING:
    from flowlib.core.op import Op


class ContextBase:
    """Base of the contexts of the three modes.

    Attributes:
        mode: how op calls are carried out.
        spec: the numbers they are carried out for.
        side: which of a flow's methods the calls belong to.
    """

    mode: ClassVar[Mode]

    def __init__(self, spec: Spec, side: Side = Side.INDEXER) -> None:
        self.spec = spec
        self.side = side

    def apply(
        self,
        op: Op,
        inputs: tuple[vTensor, ...],
        target: vTensor | SelectionHandle | None,
        result: tuple[FORMAT, tuple[int, int]] | None,
        loc: object,
    ) -> vTensor | None:
        """Carries out one checked op call; `result` is the format and inner sizes the signature found."""
        raise NotImplementedError

    def check_entries(self, tensor: torch.Tensor, format: FORMAT) -> None:
        """Raises if `tensor` can't be a vTensor of `format` here."""
        raise NotImplementedError

    def run_cache(self, flow: object, cache: Mapping[str, Any], loc: Any) -> None:
        """Runs the plan's forward_cache (reference and execute contexts)."""
        raise NotImplementedError

    def run_indexer(self, flow: object, q: Any, o: SelectionHandle, cache: Mapping[str, Any]) -> None:
        """Runs the plan's forward_indexer (reference and execute contexts)."""
        raise NotImplementedError
