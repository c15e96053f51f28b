"""Options that commands share, and how they become flows, specs and plans."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowlib.core.errors import FlowlibError, OptionError, did_you_mean
from flowlib.core.spec import KV_DTYPES, Spec

if TYPE_CHECKING:
    import torch

    from flowlib import Plan, vFlow

FlowFile = Annotated[
    str | None, typer.Option("--flow-file", metavar="PATH", help="A .py file that registers flows.", show_default=False)
]
Options = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="KEY=VALUE", help="An option of the flow, its value as JSON; may be repeated."),
]

_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "float8_e4m3fn"}
_DTYPES = {str(t).removeprefix("torch."): t for t in KV_DTYPES}
_SPEC: dict[str, tuple[type, str]] = {
    "page_size": (int, "Tokens per page; the flow's default where not given."),
    "head_dim": (int, "Size of a key."),
    "v_head_dim": (int, "Size of a value; that of a key where not given."),
    "kv_lora_rank": (int, "Content channels of an MLA latent of head_dim channels; none without MLA."),
    "group_size": (int, "Query heads per KV head."),
    "num_kv_heads": (int, "KV heads."),
    "kv_dtype": (str, "bfloat16, float16, float32 or float8_e4m3fn."),
    "scale": (float, "Factor of q·k; head_dim ** -0.5 where not given."),
    "top_k": (int, "Pages chosen beside the reserved ones."),
    "top_k_ratio": (float, "Share of a row's pages chosen, if that is more."),
    "bos": (int, "First pages, always attended."),
    "eos": (int, "Last pages, always attended."),
    "max_pages": (int, "Most pages of a row."),
    "max_batch": (int, "Most requests in a step."),
    "dense_below": (int, "Rows of at most this many tokens are attended in full."),
    "k_scale": (float, "What stored K is multiplied by."),
    "v_scale": (float, "What stored V is multiplied by."),
    "summary_dtype": (str, "As kv_dtype, for summary fields declared without a dtype; bounds are rounded outwards."),
    "summary_scale": (float, "What float8 summaries are multiplied by, a power of two."),
}


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """Turns flowlib's errors into one line on stderr and exit status 2."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except FlowlibError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from None

    run.__signature__ = inspect.signature(command, eval_str=True)  # type: ignore[attr-defined]
    return run


def takes_spec(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command one option per number of the spec; it gets those that were given as the argument `spec`."""

    @functools.wraps(command)
    def run(**kwargs: Any) -> None:
        given = {name: kwargs.pop(name) for name in _SPEC}
        command(spec=_spec_numbers(given), **kwargs)

    plain = inspect.signature(command, eval_str=True).parameters
    parameters = [p.replace(kind=p.KEYWORD_ONLY) for name, p in plain.items() if name != "spec"]
    parameters += [_spec_parameter(name, kind, text) for name, (kind, text) in _SPEC.items()]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    del run.__wrapped__  # typer would find the plain signature through it
    return run


def flow_of(name: str, flow_file: str | None, option: list[str] | None) -> vFlow:
    """The flow a command names. Raises UnknownFlowError, FlowLoadError, OptionError."""
    from flowlib import build

    return build(name, module_path=flow_file, **parse_options(option))


def plan_of(flow: vFlow, spec: Mapping[str, Any], prefix_cache: bool = False) -> Plan:
    """The flow's plan for the numbers given, its own page size and the spec's defaults."""
    from flowlib import profile

    return profile(flow, flow.default_spec(**spec), prefix_cache=prefix_cache)


def parse_options(option: list[str] | None) -> dict[str, Any]:
    """``KEY=VALUE`` texts to options of a flow; a value that is no JSON is a text. Raises OptionError."""
    parsed: dict[str, Any] = {}
    for text in option or []:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise OptionError(f"--option is {text!r}, expected KEY=VALUE, such as scale=0.1")
        try:
            parsed[key] = json.loads(value)
        except json.JSONDecodeError:
            parsed[key] = value
    return parsed


def _spec_parameter(name: str, kind: type, text: str) -> inspect.Parameter:
    default = next(p.default for p in inspect.signature(Spec).parameters.values() if p.name == name)
    shown = "" if default is None or name == "page_size" else f" Default {str(default).removeprefix('torch.')}."
    option = typer.Option(help=text + shown, show_default=False, rich_help_panel="Spec")
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _spec_numbers(given: Mapping[str, Any]) -> dict[str, Any]:
    numbers = {name: value for name, value in given.items() if value is not None}
    for name in ("kv_dtype", "summary_dtype"):
        if name in numbers:
            numbers[name] = _dtype(name, numbers[name])
    return numbers


def _dtype(option: str, name: str) -> torch.dtype:
    dtype = _DTYPES.get(_SHORT_DTYPES.get(name, name))
    if dtype is None:
        known, flag = ", ".join(_DTYPES), f"--{option.replace('_', '-')}"
        raise OptionError(f"{flag} is {name!r}, expected one of {known}.{did_you_mean(name, _DTYPES)}")
    return dtype
