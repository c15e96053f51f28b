"""The main job: stock SGLang serves a real model on a CPU, dense and with two flows, over a real text.

SmolLM2-135M-Instruct continues about 2,000 tokens of a novel. The dense run comes first; the flows, chosen by SGLang's
flag, then decode the very same tokens (teacher-forced), so that every step can be compared with the dense one. Prints a
table and draws which pages were attended to. Each engine runs in a process of its own.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import demo_report
import typer
from flowlib_cpu_host import cpu_environment
from flowlib_cpu_host.smollm2 import ensure_model
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

HERE = Path(__file__).resolve().parent
TEXT = HERE / "data" / "pride_and_prejudice.txt"
FLOWS = ("gqa_quest_sparse_attention", "block_sparse_attention")
VOCABULARY = 49152
ENGINE = {
    "device": "cpu",
    "dtype": "float32",
    "disable_cuda_graph": True,
    "enable_custom_logit_processor": True,
    "max_total_tokens": 4096,
    "mem_fraction_static": 0.5,
    "page_size": 16,
    "random_seed": 0,
}
console = Console()


@contextmanager
def engine_process(job: Path) -> Iterator[subprocess.Popen]:
    """The engine's process; it and its children are ended in any case."""
    process = subprocess.Popen(
        [sys.executable, str(HERE / "demo_engine.py"), str(job)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=cpu_environment(),
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run(name: str, job: dict[str, Any], folder: Path, progress: Progress) -> dict[str, Any]:
    """Runs one engine and follows its events; returns the last one.

    Raises:
        RuntimeError: the engine ended early; the message has the end of its log.
    """
    task = progress.add_task(f"{name}: starting SGLang", total=None)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(job), encoding="utf-8")
    log: list[str] = []
    with engine_process(path) as process:
        for line in process.stdout or ():
            if not line.startswith("EVENT "):
                log.append(line)
                continue
            event = json.loads(line.removeprefix("EVENT "))
            if event["event"] == "started":
                progress.update(task, description=f"{name}: reading {len(job['prompt'])} tokens")
            elif event["event"] == "token":
                progress.update(task, description=f"{name}: decoding", total=job["tokens"], completed=event["count"])
            else:
                progress.update(task, description=f"{name}: done")
                return event
    raise RuntimeError(f"the engine for {name} ended early:\n{''.join(log)[-4000:]}")


def job_for(
    name: str, model: Path, prompt: list[int], tokens: int, force: list[int], top_k: int, folder: Path
) -> dict[str, Any]:
    """What the engine's process is told."""
    engine: dict[str, Any] = {**ENGINE, "model_path": str(model)}
    if name != "dense":
        trace = {"path": str(folder / f"{name}.trace.jsonl"), "pages": True, "mass": True}
        engine |= {"flow": name, "flow_config": {"top_k": top_k, "bos": 1, "eos": 2, "trace": trace}}
    return {
        "engine": engine,
        "prompt": prompt,
        "tokens": tokens,
        "force": force,
        "logits": str(folder / f"{name}.logits"),
    }


def collect(name: str, event: dict[str, Any], folder: Path) -> demo_report.Run:
    """What a run left behind."""
    trace = [] if name == "dense" else demo_report.load_trace(folder / f"{name}.trace.jsonl", len(event["tokens"]) - 1)
    logits = demo_report.load_logits(folder / f"{name}.logits", VOCABULARY)
    return demo_report.Run(name, event["tokens"], logits, event["steps"], event["seconds"], trace)


def tokenize(model: Path, count: int) -> list[int]:
    """The first `count` tokens of the text."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)(TEXT.read_text(encoding="utf-8"))["input_ids"][:count]


def main(
    tokens: Annotated[int, typer.Option(help="Tokens to decode.", min=4)] = 48,
    context: Annotated[int, typer.Option(help="Tokens of the text to read first.", min=256)] = 2000,
    top_k: Annotated[
        int, typer.Option(help="Pages chosen per layer and kv head, besides 3 reserved ones.", min=0)
    ] = 24,
    out: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("out/demo.png"),
) -> None:
    """Serves SmolLM2-135M with stock SGLang on the CPU, dense and sparse, and compares."""
    model = ensure_model()
    prompt = tokenize(model, context)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    runs: list[demo_report.Run] = []
    with (
        tempfile.TemporaryDirectory(prefix="flowlib-demo-") as scratch,
        Progress(*columns, console=console) as progress,
    ):
        folder = Path(scratch)
        for name in ("dense", *FLOWS):
            force = runs[0].tokens if runs else []
            event = run(name, job_for(name, model, prompt, tokens, force, top_k, folder), folder, progress)
            runs.append(collect(name, event, folder))
    dense, *sparse = runs
    console.print(
        f"SmolLM2-135M-Instruct (30 layers, 9 query and 3 kv heads of 64, fp32) after {len(prompt):,} tokens of "
        f"{TEXT.stem}; pages of 16 tokens, counted by the plugin over {len(dense.tokens) - 1} steps in all layers"
    )
    console.print(demo_report.table(dense, sparse))
    console.print("On a CPU flows run in their torch reference, op by op: the speed here says nothing about a GPU.")
    demo_report.draw(sparse, out)
    console.print(f"Which pages each decode step attended to: {out}")


if __name__ == "__main__":
    typer.run(main)
