"""The server arguments of SGLang 0.5.16 with the fields of :mod:`flowlib.sglang.args`."""

import dataclasses
from typing import Any

from sglang.srt.arg_groups.arg_utils import A, Arg
from sglang.srt.server_args import ServerArgs

from flowlib.sglang import PLUGIN_NAME
from flowlib.sglang.args import FLOW_CONFIG_HELP, FLOW_HELP, resolve


@dataclasses.dataclass
class FlowServerArgs(ServerArgs):
    """The stock arguments plus the flow to decode with and its configuration."""

    flow: A[str | None, Arg(help=FLOW_HELP)] = None
    flow_config: A[str | None, Arg(help=FLOW_CONFIG_HELP)] = None
    flow_served: A[dict[str, Any] | None, Arg(no_cli=True)] = dataclasses.field(default=None, init=False)

    def __post_init__(self) -> None:
        served = resolve(self, super().__post_init__)
        if served is not None:
            self.override(PLUGIN_NAME, flow_served=served)
