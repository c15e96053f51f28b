"""The command line: ``flowlib list | profile | kernels | verify``.

Errors of :mod:`flowlib.errors` become one line and exit status 2; a failed comparison is exit status 1.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from flowlib import __version__
from flowlib.cli import show
from flowlib.cli.options import FlowFile, Options, flow_of, guarded, plan_of, takes_spec

app = typer.Typer(
    name="flowlib",
    help="Sparse-attention methods for LLM decoding: list, profile, compile and verify them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
Name = Annotated[str, typer.Argument(metavar="FLOW", help="Registered name or alias.", show_default=False)]


def main() -> None:
    """Entry point of the console script and of ``python -m flowlib``."""
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options before a command."""


@app.command("list")
@guarded
def list_flows(flow_file: FlowFile = None) -> None:
    """List the registered flows with aliases, default page size, fields and what they do."""
    show.flows(flow_file)


@app.command("profile")
@guarded
@takes_spec
def profile(
    flow: Name,
    spec: dict[str, Any],
    flow_file: FlowFile = None,
    option: Options = None,
    bandwidth: Annotated[
        float | None, typer.Option(min=0.001, help="Read bandwidth in TB/s: prints the floor time of each stage.")
    ] = None,
    prefix_cache: Annotated[
        bool, typer.Option("--prefix-cache", help="Requests share pages: refused for a flow with state.")
    ] = False,
) -> None:
    """Print a flow's plan for a spec: fields, graph, stages, bytes, buffers. Needs no GPU and no Triton."""
    from flowlib.runtime.describe import describe

    plan = plan_of(flow_of(flow, flow_file, option), spec, prefix_cache)
    typer.echo(describe(plan, bandwidth))


@app.command("kernels")
@guarded
@takes_spec
def kernels(
    flow: Name,
    spec: dict[str, Any],
    flow_file: FlowFile = None,
    option: Options = None,
    path: Annotated[bool, typer.Option("--path", help="Print the path of the generated file only.")] = False,
) -> None:
    """Print the Triton source generated for a flow and a spec; its path goes to stderr."""
    from flowlib.compiler.load import write_source

    source = plan_of(flow_of(flow, flow_file, option), spec).program.source
    where = write_source(source)
    if path:
        typer.echo(str(where))
        return
    typer.echo(source.rstrip("\n"))
    typer.echo(str(where), err=True)


@app.command("verify")
@guarded
@takes_spec
def verify(
    spec: dict[str, Any],
    flows: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FLOW]...", help="Names or aliases; with --flow-file alone: the flows of the file."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Verify every registered flow.")] = False,
    device: Annotated[
        str | None, typer.Option(help="cpu (Triton is interpreted) or cuda; by default cuda, where there is one.")
    ] = None,
    impl: Annotated[
        list[str] | None, typer.Option(help="reference or triton; repeat for both, which is the default.")
    ] = None,
    flow_file: FlowFile = None,
    option: Options = None,
    seed: Annotated[int, typer.Option(help="Seed of the inputs.")] = 0,
) -> None:
    """Compare a flow's float64 reference and its Triton kernels with an oracle, stage by stage.

    Spec options given here hold in every spec that is tried. Exit status 1 if anything is beyond its tolerance.
    """
    from flowlib.cli.verify import verify_flows

    good = verify_flows(
        flows or [], every=every, device=device, impl=impl, flow_file=flow_file, option=option, spec=spec, seed=seed
    )
    if not good:
        raise typer.Exit(1)
