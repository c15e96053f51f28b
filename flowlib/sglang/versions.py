"""Which SGLang is installed, and flowlib's adapter to it: a package a version, for what differs between them.

The rest of the plugin knows no version. An adapter imports SGLang only where SGLang calls it.
"""

from importlib import import_module
from importlib.metadata import version
from typing import Any, Protocol, cast

from flowlib.core.errors import BackendError
from flowlib.sglang.ledger import Touch
from flowlib.sglang.refusals import Refusal

ADAPTERS = {"0.5.16": "flowlib.sglang.v0_5_16", "0.5.23": "flowlib.sglang.v0_5_23"}
"""Known versions of SGLang, oldest first, and the package that adapts flowlib to each."""


class Adapter(Protocol):
    """What differs from version to version."""

    @property
    def TOUCHED(self) -> tuple[Touch, ...]:
        """The ledger's entries of this version alone."""
        ...

    @property
    def FLAGS(self) -> tuple[Refusal, ...]:
        """Flags of this version alone that a flow can't be served with."""
        ...

    @property
    def LATENTS(self) -> bool:
        """Whether flows over MLA latents are served."""
        ...

    @property
    def SCHEDULERS(self) -> tuple[str, ...]:
        """The server arguments that start more than one scheduler when they are above 1."""
        ...

    def in_effect(self, args: Any) -> Any:
        """The server arguments as SGLang resolved them, with ``get_model_config()`` and ``get_attention_backends()``.

        Args:
            args: SGLang's ``ServerArgs`` once they are resolved, in any of its processes.
        """
        ...

    def shares_batch(self, args: Any) -> bool:
        """Whether all ranks that exchange values decode the same batch, so that they choose the same CUDA graph.

        With data parallel attention they do not: what SGLang's all-reduce has registered of a graph are the buffers of
        the same graph on the other ranks.
        """
        ...

    def attention_ranks(self, args: Any) -> int:
        """Over how many ranks the heads of one request are split; `args` are the arguments in effect."""
        ...


def check_version() -> str:
    """The version of the installed SGLang.

    Raises:
        BackendError: no adapter knows it.
        PackageNotFoundError: there is none.
    """
    found = version("sglang")
    if found not in ADAPTERS:
        raise BackendError(f"flowlib's plugin knows SGLang {' and '.join(ADAPTERS)}, found {found}")
    return found


def adapter() -> Adapter:
    """The adapter to the installed SGLang. Raises as :func:`check_version`."""
    return cast(Adapter, import_module(ADAPTERS[check_version()]))
