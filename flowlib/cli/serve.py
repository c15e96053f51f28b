"""``flowlib serve``: checks a flow and its configuration, says what will run, and becomes ``sglang serve``."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from flowlib.cli.options import parse_options
from flowlib.core.errors import BackendError, OptionError
from flowlib.sglang import PLUGIN_NAME
from flowlib.sglang.options import FlowConfig
from flowlib.sglang.refusals import refuse_normaliser
from flowlib.sglang.setup import build_flow, options_of
from flowlib.sglang.versions import check_version


def serve_command(
    flow: str, arguments: Sequence[str], *, flow_config: str | None, said: dict[str, Any]
) -> tuple[list[str], str]:
    """The command line of ``sglang serve``, and what to print before it runs.

    Args:
        flow: registered name or alias.
        arguments: what SGLang gets, unchanged.
        flow_config: JSON text as for ``--flow-config``.
        said: keys of the same that have options of their own; ``None`` where not given.

    Raises:
        FlowlibError: the flow, its options or its budget are wrong, or SGLang is missing, of another release or told
            to leave flowlib out.
    """
    _refuse_arguments(flow, arguments)
    config = _config(flow_config, said)
    built = build_flow(flow, config)
    refuse_normaliser(flow, built)
    command = [_program(), "serve", *arguments, "--flow", flow]
    if config != FlowConfig():
        command += ["--flow-config", config.to_json()]
    return command, _lines(flow, options_of(built, config), config, command, page_size=built.default_page_size)


def _lines(flow: str, said: dict[str, Any], config: FlowConfig, command: Sequence[str], page_size: int) -> str:
    numbers = {**config.budget_numbers(), "dense_below": config.dense_below}
    budget = ", ".join(f"{name} {value if isinstance(value, str) else f'{value:g}'}" for name, value in numbers.items())
    options = ", ".join(f"{name}={value}" for name, value in said.items()) or "none"
    given = _given(command, "--page-size") or f"{page_size}, the flow's default"
    lines = (
        f"flow    {flow} (options {options})",
        f"budget  {budget}; --page-size {given}",
        f"runs    {shlex.join(['sglang', *command[1:]])}",
    )
    return "\n".join(lines)


def start(command: Sequence[str]) -> None:
    """Replaces this process by the server, which thus gets its signals and gives its exit status."""
    sys.stdout.flush()
    os.execv(command[0], list(command))


def _config(flow_config: str | None, said: dict[str, Any]) -> FlowConfig:
    given = {name: value for name, value in said.items() if value is not None}
    if given.get("option") is not None:
        given["options"] = parse_options(given.pop("option"))
    config = FlowConfig.parse(flow_config)
    if flow_config is not None:
        twice = [name for name in given if name in json.loads(flow_config)]
        if twice:
            raise OptionError(f"{twice[0]} is given in --flow-config and by an option of its own: leave one out")
        given = json.loads(config.to_json()) | given
    return FlowConfig.parse(given)


def _refuse_arguments(flow: str, arguments: Sequence[str]) -> None:
    if flow.startswith("-"):
        raise OptionError(f"the first argument is {flow!r}, expected the name of a flow: flowlib serve FLOW MODEL ...")
    if _given(arguments, "--flow") is not None:
        raise OptionError("--flow is given beside the flow's name, which is the first argument: leave --flow off")


def _given(arguments: Sequence[str], name: str) -> str | None:
    """The value of an argument that goes to SGLang; ``None`` where it is not given."""
    for i, argument in enumerate(arguments):
        if argument == name:
            return arguments[i + 1] if i + 1 < len(arguments) else ""
        if argument.startswith(name + "="):
            return argument.partition("=")[2]
    return None


def _program() -> str:
    """Path of the ``sglang`` command beside this Python, else on the path."""
    try:
        check_version()
    except importlib.metadata.PackageNotFoundError as error:
        raise BackendError(
            "SGLang is not installed beside flowlib: pip install 'flowlib[sglang]' in the environment that serves"
        ) from error
    plugins = [name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()]
    if plugins and PLUGIN_NAME not in plugins:
        raise BackendError(f"SGLANG_PLUGINS is {','.join(plugins)!r}, which leaves {PLUGIN_NAME} out: add it")
    beside = Path(sys.executable).with_name("sglang")
    found = str(beside) if beside.exists() else shutil.which("sglang")
    if found is None:
        raise BackendError(f"SGLang is installed, but there is no command 'sglang' beside {sys.executable} or on PATH")
    return found


def layers(text: str | None) -> list[int] | None:
    """Layer ids of a text such as ``0,1``. Raises OptionError."""
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise OptionError(f"--dense-layers is {text!r}, expected layer ids such as 0,1") from error


def run(flow: str, arguments: Sequence[str], flow_config: str | None, said: dict[str, Any], dry_run: bool) -> None:
    """Prints what will run and, unless `dry_run`, becomes it. Raises FlowlibError as :func:`serve_command`."""
    command, text = serve_command(flow, arguments, flow_config=flow_config, said=said)
    typer.echo(text)
    if not dry_run:
        start(command)
