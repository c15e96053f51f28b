"""The attention backend that decodes with a flow. Prefill is another backend's, and dense."""

import logging
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

import flowlib
from flowlib.core.errors import BackendError
from flowlib.sglang import PLUGIN_NAME, counters, ledger, mla_prefill, refusals
from flowlib.sglang.counters import Counters
from flowlib.sglang.leave import leaving_with_reason
from flowlib.sglang.pages import KernelSteps, Step, torch_step
from flowlib.sglang.pool import FlowFields
from flowlib.sglang.trace import Trace, open_trace
from flowlib.sglang.versions import adapter

logger = logging.getLogger("flowlib.sglang")


def register_backend() -> None:
    """Makes ``flowlib`` a value of SGLang's attention backend flags, and gives SGLang its factory."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.server_args import add_attention_backend_choices

    add_attention_backend_choices([PLUGIN_NAME])
    register_attention_backend(PLUGIN_NAME)(create_backend)


def create_backend(runner: Any) -> "FlowBackend":
    """The backend for a ``ModelRunner``; leaves the process when the flow can't be served by it."""
    flow = getattr(runner.server_args, "flow", None)
    with leaving_with_reason(flow or "(none)"):
        ledger.check_hooks()
        if flow is None:
            raise BackendError(f"the attention backend {PLUGIN_NAME!r} needs --flow")
        return FlowBackend(runner)


class FlowBackend(AttentionBackend):
    """Decodes every sparse layer through its plan, from the first token past the budget.

    Args:
        runner: SGLang's ``ModelRunner``, whose pool keeps the flow's fields.

    Attributes:
        short_tokens: batches of at most so many tokens a request have CUDA graphs of their own
            (:mod:`flowlib.sglang.graphs`); 0 where there are none.
        captures_short: such a graph is being captured.

    Raises:
        BackendError: the pool is not flowlib's, or an attention layer can't be served.
    """

    needs_cpu_seq_lens = False
    step: Step  # planned by SGLang's call before the layers run

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        if not isinstance(self.token_to_kv_pool, FlowFields):
            kind = type(self.token_to_kv_pool).__name__
            raise BackendError(f"SGLang built the KV pool {kind}, expected one with the flow's fields")
        self.setup = self.token_to_kv_pool.flow_setup
        facts = self.setup.facts
        layers = attention_layers(runner.model)
        if not layers:
            raise BackendError(
                f"{type(runner.model).__name__} has no RadixAttention layer, so nothing could be checked"
            )
        refuse = refusals.refuse_layers if facts.kv_lora_rank is None else refusals.refuse_latent_layers
        refuse(layers, facts.head_dim, facts.v_head_dim)
        args = adapter().in_effect(runner.server_args)
        prefill = args.get_attention_backends()[0]
        refusals.refuse_prefill(prefill, facts.kv_dtype is torch.float8_e4m3fn)
        mla_prefill.check_prefill(prefill, self.setup, runner.model, layers)
        self.trace: Trace | None = open_trace(self.setup)
        self.counters = self._open_counters(args)
        short = self.setup.short_pages if adapter().shares_batch(args) else 0
        self.short_tokens, self.captures_short = short * facts.page_size, False
        self.steps = KernelSteps(self.req_to_token_pool.req_to_token, facts.max_pages, facts.page_size, short)
        for line in self.setup.describe():
            logger.info("flowlib: %s", line)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plans a step that runs without a CUDA graph. Prefill plans its chunks itself."""
        if not forward_batch.forward_mode.is_decode_or_idle():
            return
        if self.setup.impl == "triton":
            self.step = self.steps.eager_step(forward_batch)
        else:
            self.step = torch_step(self.req_to_token_pool.req_to_token, forward_batch, self.setup.facts.page_size)
        if self.trace is not None:
            self.trace.begin(forward_batch)
        if self.counters is not None:
            self.counters.begin(self.step.batch.seq_lens.shape[0], in_graph=False)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Makes the static buffers of all graphs."""
        self.steps.allocate(max_bs)
        if self.counters is not None:
            self.counters.allocate(max_bs)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Chooses the buffers of a batch size before its graph is captured; a replay needs nothing from the host."""
        if in_capture:
            self.step = self.steps.graph_step(forward_batch.batch_size, self.captures_short)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Lengths and page table of the step, recorded in the graph and computed anew at every replay."""
        self.steps.fill(self.step, forward_batch)
        if self.counters is not None:
            self.counters.begin(self.step.batch.seq_lens.shape[0], in_graph=True)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Padded rows have one token: one reserved page, no scored one, so they write no state."""
        return 1

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """One decode step of one layer.

        Args:
            q: ``[bs, H_q * D]``; k, v: ``[bs, H_kv, D]`` and ``[bs, H_kv, Dv]`` of the step's tokens.
            layer: SGLang's ``RadixAttention``.

        Returns:
            ``[bs, H_q * Dv]`` in the dtype of `q`.
        """
        self._store(k, v, layer, forward_batch, save_kv_cache, kwargs)
        queries = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        store = self.token_to_kv_pool.flow_store(layer)
        out = self._attend(queries, store, layer, forward_batch.out_cache_loc)
        return out.o.reshape(queries.shape[0], -1).to(q.dtype)

    def forward_extend(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Refused: prefill is another backend's, or goes past the backend in chunks of an MLA model's latents."""
        raise BackendError(f"prefill reached the attention backend {PLUGIN_NAME!r}, which only decodes")

    def _store(self, k: Any, v: Any, layer: Any, forward_batch: Any, save: bool, others: dict[str, Any]) -> None:
        from sglang.srt.mem_cache.memory_pool import KVWriteLoc

        given = [name for name, value in others.items() if value is not None]
        if given:
            raise BackendError(f"layer {layer.layer_id} attends with {', '.join(given)}, which a flow can't serve")
        if not save or k is None:
            raise BackendError(
                f"layer {layer.layer_id} does not write its K and V through the pool, so a flow can't serve it"
            )
        where = KVWriteLoc(forward_batch.out_cache_loc)
        if self._updates(layer):
            self.token_to_kv_pool.set_kv_buffer_alone(layer, where, k, v)
        else:
            self.token_to_kv_pool.flow_write(layer, where, k, v)

    def _updates(self, layer: Any) -> bool:
        """Whether the step of a layer updates the fields of the pages it finishes, in the launch that scores."""
        return self.setup.impl == "triton" and not self.setup.is_dense(layer)

    def _attend(self, q: torch.Tensor, store: Any, layer: Any, loc: torch.Tensor) -> Any:
        plan, impl, batch = self.setup.plan_for(layer), self.setup.impl, self.step.batch
        if self.setup.is_dense(layer):
            if self.trace is not None:
                self.trace.record_dense(layer.layer_id)
            return flowlib.dense(q, store, batch, impl=impl)
        if impl == "triton":
            out = self.step.output(plan)
            plan.launch(q, store, batch, out, loc)
        else:
            out = plan.step(q, store, batch, impl=impl)
        if self.trace is not None:
            self.trace.record(layer.layer_id, q, store, batch, out)
        if self.counters is not None:
            self.counters.add(layer.layer_id, out.lengths, batch.seq_lens)
        return out

    def _open_counters(self, args: Any) -> Counters | None:
        """The counters of this rank where SGLang publishes metrics."""
        setup = self.setup
        if not args.enable_metrics or not setup.sparse_layers:
            return None
        lists = setup.facts.num_kv_heads * setup.plan.lanes
        pool, size = self.token_to_kv_pool, setup.facts.page_size
        alike = setup.plan.program.covers  # finite scores, so that a list is as long as the budget and the row allow
        made = Counters(setup.name, pool, lists, setup.sparse_layers, size, pool.device, alike)
        counters.serve(made)
        return made


def attention_layers(model: torch.nn.Module) -> list[Any]:
    """The attention layers of a model, in the order of their ids."""
    from sglang.srt.layers.radix_attention import RadixAttention

    found = [module for module in model.modules() if isinstance(module, RadixAttention)]
    return sorted(found, key=lambda layer: layer.layer_id)
