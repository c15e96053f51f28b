"""The adapter to SGLang 0.5.16: its server arguments are a dataclass that resolves itself when it is made."""

from typing import Any

from flowlib.sglang.refusals import Refusal
from flowlib.sglang.v0_5_16 import mla, symbols

__all__ = ["FLAGS", "LATENTS", "SCHEDULERS", "TOUCHED", "attention_ranks", "in_effect", "shares_batch"]

TOUCHED = symbols.TOUCHED + mla.TOUCHED
FLAGS: tuple[Refusal, ...] = ()
LATENTS = True
SCHEDULERS = ("dp_size", "pp_size")


def in_effect(args: Any) -> Any:
    """The arguments themselves: resolving writes to them."""
    return args


def shares_batch(args: Any) -> bool:
    """Not with data parallel attention over more than one rank."""
    return not args.enable_dp_attention or args.dp_size == 1


def attention_ranks(args: Any) -> int:
    """Ranks of tensor parallelism, but for those that data parallel attention takes."""
    return args.tp_size // (args.dp_size if args.enable_dp_attention else 1)
