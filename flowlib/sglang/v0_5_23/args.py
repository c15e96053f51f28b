"""The server arguments of SGLang 0.5.23 with the fields of :mod:`flowlib.sglang.args`."""

# pyright: reportAttributeAccessIssue=false
# The type checker sees the environment's SGLang 0.5.16; the ledger's contract test checks these names.

from typing import Any

from sglang.srt.arg_groups.arg_utils import A, Arg
from sglang.srt.arg_groups.overrides import declare_resolution
from sglang.srt.server_args import ServerArgs

from flowlib.sglang import PLUGIN_NAME
from flowlib.sglang.args import FLOW_CONFIG_HELP, FLOW_HELP, resolve


class FlowServerArgs(ServerArgs):
    """The stock arguments plus the flow to decode with and its configuration.

    SGLang pickles it to its processes with what was declared; ``flow_served`` is always declared, never said.
    """

    flow: A[str | None, Arg(help=FLOW_HELP)] = None
    flow_config: A[str | None, Arg(help=FLOW_CONFIG_HELP)] = None
    flow_served: A[dict[str, Any] | None, Arg(no_cli=True)] = None

    def resolve_once(self) -> None:
        """Resolves as SGLang does, which calls it in every process, and checks the flow the first time."""
        if getattr(self, "_resolution_finished", False):
            return
        if self.flow_served is not None:
            raise SystemExit("flowlib: flow_served is no argument: name the flow with flow")
        served = resolve(self, super().resolve_once)
        if served is not None:
            declare_resolution(self, PLUGIN_NAME, flow_served=served)
