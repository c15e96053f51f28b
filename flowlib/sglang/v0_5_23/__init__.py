"""The adapter to SGLang 0.5.23: its server arguments are a record of what was said, and resolving declares the rest."""

# pyright: reportAttributeAccessIssue=false
# The type checker sees the environment's SGLang 0.5.16; the ledger's contract test checks these names.

from typing import Any

from flowlib.sglang.refusals import MISSES_WRITES, Refusal
from flowlib.sglang.v0_5_23.symbols import TOUCHED

__all__ = ["FLAGS", "LATENTS", "SCHEDULERS", "TOUCHED", "attention_ranks", "in_effect", "shares_batch"]

OWN_SPARSE = ("minicpm_flashattn", "minicpm_flashinfer", "qsa")
"""Attention backends that choose tokens themselves."""

FLAGS = (
    Refusal(
        lambda a: a.enable_kv_cache_sharding,
        "--enable-kv-cache-sharding",
        "the pages of a request would lie on several ranks",
    ),
    Refusal(
        lambda a: a.enable_unified_cache_external_linker, "--enable-unified-cache-external-linker", MISSES_WRITES
    ),
    Refusal(lambda a: a.enable_pd_role_switch, "--enable-pd-role-switch", MISSES_WRITES),
    Refusal(
        lambda a: a.enable_nvidia_megakernel, "--enable-nvidia-megakernel", "it attends and writes K and V by itself"
    ),
    Refusal(lambda a: a.enable_amd_monokernel, "--enable-amd-monokernel", "it attends and writes K and V by itself"),
    Refusal(
        lambda a: a.prefill_attention_backend in OWN_SPARSE,
        "--prefill-attention-backend",
        f"{', '.join(OWN_SPARSE)} leave tokens out in prefill",
    ),
    Refusal(
        lambda a: a.attention_backend in OWN_SPARSE,
        "--attention-backend",
        f"{', '.join(OWN_SPARSE)} leave tokens out in prefill",
    ),
    Refusal(
        lambda a: a.startup_weight_load_mode == "overlap" and a.kv_cache_dtype == "fp8_e4m3",
        "--startup-weight-load-mode",
        "the scales of an fp8 KV cache would be read after CUDA graphs are captured with them",
    ),
)
LATENTS = False
SCHEDULERS = ("dp_size", "attn_dp_size", "pp_size")


class InEffect:
    """The arguments as resolving declared them; reads like those of other versions.

    Args:
        record: SGLang's ``ServerArgs``, which hold what was said.
    """

    def __init__(self, record: Any) -> None:
        self._record = record

    def __getattr__(self, name: str) -> Any:
        from sglang.srt.arg_groups.overrides import resolution_result

        said = getattr(self._record, name)  # SGLang's own reader takes any name
        return resolution_result(self._record, name, said)

    def get_model_config(self) -> Any:
        """SGLang's ``ModelConfig``, made once."""
        from sglang.srt.arg_groups.overrides import model_config_of

        return model_config_of(self._record)

    def get_attention_backends(self) -> tuple[str | None, str | None]:
        """Names of the backends of prefill and decode."""
        from sglang.srt.arg_groups.overrides import attention_backends_of

        return attention_backends_of(self)


def in_effect(args: Any) -> InEffect:
    """A reader of the record and of what resolving declared."""
    return InEffect(args)


def shares_batch(args: Any) -> bool:
    """Not with data parallel attention over more than one rank."""
    return args.attn_dp_size == 1


def attention_ranks(args: Any) -> int:
    """Ranks of tensor parallelism, but for those that data and context parallel attention take."""
    from sglang.srt.runtime_context import attn_tp_size_of

    return attn_tp_size_of(args)
