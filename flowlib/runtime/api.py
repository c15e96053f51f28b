"""The functions of the public surface: flows by name, plans, and dense attention."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

import flowlib.algorithms  # noqa: F401  (registers the built-in flows)
from flowlib.compiler.pipeline import compile_flow
from flowlib.compiler.verify import refuse_shared_state
from flowlib.core import registry
from flowlib.core.attention import Entmax, Normaliser, Softmax, check_normaliser
from flowlib.core.errors import FormatError, OptionError
from flowlib.core.flow import vFlow, vFlowMLA
from flowlib.core.spec import Spec
from flowlib.runtime import reference
from flowlib.runtime.attention import entmax, listed
from flowlib.runtime.batch import Batch
from flowlib.runtime.plan import Plan
from flowlib.runtime.pool import KVStore


def list_flows(mla: bool | None = None) -> list[str]:
    """Names of all registered flows, sorted; aliases are left out.

    Args:
        mla: only the flows over MLA latents (``True``), or over separate K and V (``False``).
    """
    names = registry.registered()
    return names if mla is None else [n for n in names if issubclass(registry.find(n), vFlowMLA) is mla]


def build(name: str, module_path: str | Path | None = None, **options: object) -> vFlow:
    """A flow by its registered name or alias.

    Args:
        name: registered name or alias.
        module_path: a ``.py`` file that registers it.
        options: arguments of the flow's ``__init__``.

    Raises:
        UnknownFlowError, OptionError, FlowLoadError: with what is known and what was meant.
    """
    if module_path is not None:
        registry.load_file(module_path)
    return registry.construct(name, options)


def profile(flow: vFlow, spec: Spec, prefix_cache: bool = False) -> Plan:
    """Profiles a flow for a spec: no data, no device, no Triton.

    Args:
        flow: an instance; a copy of it is profiled.
        spec: the numbers.
        prefix_cache: whether requests will share pages, which a flow with state refuses.

    Raises:
        FlowDefinitionError, ShapeError, FormatError, OptionError: with the line of the flow's file.
    """
    if not isinstance(flow, vFlow):
        got = f"the class {flow.__name__}" if isinstance(flow, type) else repr(flow)
        raise FormatError(f"profile: 'flow' is {got}; pass an instance: flowlib.build(name) or FlowClass()")
    if not isinstance(spec, Spec):
        raise FormatError(f"profile: 'spec' is {type(spec).__name__}, expected flowlib.Spec(...)")
    spec = flow.adapt(spec)
    plan = Plan(compile_flow(flow, spec), spec)
    if prefix_cache:
        refuse_shared_state(flow.flow_name or type(flow).__name__, plan.state_fields)
    return plan


@dataclass(frozen=True)
class DenseOutput:
    """Exact attention: o ``[rows, H_q, Dv]`` and lse ``[rows, H_q]``, natural log; with entmax tau ``[rows, H_q]``
    in its place."""

    o: torch.Tensor
    lse: torch.Tensor | None
    tau: torch.Tensor | None = None


def dense(
    q: torch.Tensor,
    store: KVStore,
    batch: Batch,
    impl: str = "reference",
    dtype: torch.dtype | None = None,
    attention: Normaliser | None = None,
) -> DenseOutput:
    """Exact attention over the whole row, with the arguments of :meth:`flowlib.Plan.step`.

    Args:
        q, store, batch, impl, dtype: as there.
        attention: ``None`` means softmax, whatever the flow of the pool: what a model without the flow computes. A step
            of a flow with entmax is to be held against ``attention=plan.attention``, whose threshold is solved for here
            whatever its ``tau_mode``.

    Raises:
        as :meth:`flowlib.Plan.step`. OptionError: entmax over MLA's latent.
    """
    if not isinstance(store, KVStore):
        raise FormatError(f"dense: the pool is {type(store).__name__}, expected a flowlib.PagedPool or KVStore")
    plan = store.plan
    plan.check_inputs("dense", q, store, batch)
    plan.check_impl(impl, store.device)
    normaliser = _exact(plan, attention)
    if impl == "triton":
        if dtype is not None:
            raise OptionError("dense: dtype is for impl='reference'; impl='triton' accumulates in fp32")
        from flowlib.runtime.execute import attend_everything

        done = attend_everything(plan, q, store, batch, normaliser)
        return DenseOutput(done.o, done.lse, done.tau)
    counts = reference.num_pages_of(batch, plan.spec)
    logical = torch.arange(batch.width, dtype=torch.int32, device=batch.device)
    pages = torch.where(logical < counts[:, None], logical, -1)
    pages, wide = pages[:, None, :].expand(-1, plan.spec.num_kv_heads, -1), dtype or torch.float32
    if isinstance(normaliser, Entmax):
        tokens = listed(q, store, batch, pages, plan.spec, wide)
        weighted = entmax(tokens, plan.spec, normaliser, None, counts < 0)
        return DenseOutput(weighted.o if dtype is not None else weighted.o.to(q.dtype), None, weighted.tau)
    o, lse = reference.attend(q, store, batch, pages, plan.spec, wide)
    return DenseOutput(o if dtype is not None else o.to(q.dtype), lse)


def _exact(plan: Plan, attention: Normaliser | None) -> Normaliser:
    """The normaliser of exact attention: one that solves for its threshold."""
    normaliser = check_normaliser("dense", Softmax() if attention is None else attention)
    if isinstance(normaliser, Softmax):
        return normaliser
    if plan.spec.is_mla:
        raise OptionError(f"dense: attention is {normaliser}, expected softmax over MLA's latent")
    return Entmax(normaliser.alpha)
