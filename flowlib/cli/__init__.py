"""The command line: ``flowlib list | profile | kernels | verify | serve``.

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
    help="Sparse-attention methods for LLM decoding: list, profile, compile, verify and serve them.",
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


@app.command(
    "serve",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    options_metavar="[OPTIONS] [ARGUMENTS OF sglang serve]...",
)
@guarded
def serve_flow(
    context: typer.Context,
    flow: Name,
    top_k: Annotated[int | None, typer.Option(help="Pages chosen beside the reserved ones.")] = None,
    top_k_ratio: Annotated[float | None, typer.Option(help="Share of a row's pages chosen, if that is more.")] = None,
    bos: Annotated[int | None, typer.Option(help="First pages, always attended.")] = None,
    eos: Annotated[int | None, typer.Option(help="Last pages, always attended.")] = None,
    dense_below: Annotated[int | None, typer.Option(help="Requests of so many tokens are attended in full.")] = None,
    dense_layers: Annotated[
        str | None, typer.Option(metavar="IDS", help="Layers that attend to everything, such as 0,1.")
    ] = None,
    summary_dtype: Annotated[str | None, typer.Option(help="auto, bf16, fp16, fp32 or fp8_e4m3.")] = None,
    summary_scale: Annotated[float | None, typer.Option(help="What fp8 summaries are multiplied by.")] = None,
    flow_file: FlowFile = None,
    option: Options = None,
    flow_config: Annotated[
        str | None, typer.Option(metavar="JSON", help="The same and more as one JSON object, as for SGLang's flag.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would run, and run nothing.")] = False,
) -> None:
    """Serve a model with a flow: `sglang serve` with the flow checked first. What is not listed here goes to SGLang.

    Example: flowlib serve gqa_quest_sparse_attention MODEL --top-k 64 --tp 2 --port 30000
    """
    from flowlib.cli.serve import layers, run

    said = {
        "top_k": top_k, "top_k_ratio": top_k_ratio, "bos": bos, "eos": eos, "dense_below": dense_below,
        "dense_layers": layers(dense_layers), "summary_dtype": summary_dtype, "summary_scale": summary_scale,
        "module_path": flow_file, "option": option or None,
    }  # fmt: skip
    run(flow, context.args, flow_config, said, dry_run)
