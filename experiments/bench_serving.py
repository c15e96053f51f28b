"""End to end: stock SGLang decoding densely against the same server with flows, on random weights of published shapes.

One engine at a time, each in a process of its own, all with the same settings and prompts. A correctness gate comes
first; without it no speed is printed. Decoding speed is the difference of two lengths of answers to cached prompts, so
that prefill is not in it; TTFT is that of prompts not cached. ``python experiments/bench_serving.py --quick``.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import bench_serving_gate as gate
import bench_serving_shapes as shapes
import torch
import typer
from bench_serving_report import Result, Row, render, save
from bench_serving_shapes import BenchError, Server, Workload
from rich.console import Console

HERE = Path(__file__).resolve().parent
_PLAIN_WIDTH = 150
console = Console() if Console().is_terminal else Console(width=_PLAIN_WIDTH)
DEVICES = ("cuda", "cpu")
SMALL_BUDGET = 1


class EngineError(Exception):
    """An engine ended early; the message has the end of its log."""


@contextmanager
def engine_process(job: Path, device: str, ranks: int) -> Iterator[subprocess.Popen]:
    """The engine's process; it and its children are ended in any case."""
    env = dict(os.environ)
    if device == "cpu":
        from flowlib_cpu_host import cpu_environment

        env = cpu_environment()
        if ranks > 1:  # a core each; SGLang otherwise wants a NUMA node each
            env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(ranks)))
    process = subprocess.Popen(
        [sys.executable, str(HERE / "bench_serving_engine.py"), str(job)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_engine(job: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Runs one engine to its end and returns its events. Raises EngineError."""
    folder.mkdir(exist_ok=True)
    path = folder / "job.json"
    path.write_text(json.dumps(job), encoding="utf-8")
    events: list[dict[str, Any]] = []
    log: list[str] = []
    with engine_process(path, job["engine"]["device"], job["engine"].get("tp_size", 1)) as process:
        for line in process.stdout or ():
            if not line.startswith("EVENT "):
                log.append(line)
                continue
            events.append(json.loads(line.removeprefix("EVENT ")))
            if events[-1]["event"] == "done":
                return events
    raise EngineError("".join(log)[-3000:])


class Bench:
    """The run: the gate, then the servers one by one.

    Args:
        device: ``cuda`` or ``cpu``.
        workloads: what is measured.
        new_tokens: tokens of an answer.
        repeats: how often an answer is timed.
        seed: of prompts and forced tokens.
        folder: for models, jobs and what engines write.
        page_size: tokens of a page.
        gate_jobs: engines of the gate at a time.
    """

    def __init__(
        self, device: str, workloads: list[Workload], new_tokens: int, repeats: int, seed: int, folder: Path,
        page_size: int, gate_jobs: int = 1,
    ) -> None:  # fmt: skip
        self.device = device
        self.workloads = workloads
        self.new_tokens = new_tokens
        self.repeats = repeats
        self.seed = seed
        self.folder = folder
        self.page_size = page_size
        self.gate_jobs = gate_jobs
        longest = max(w.context for w in workloads)
        self.context = longest + new_tokens + 64
        self.settings = shapes.engine_settings(device, self.context, max(w.batch for w in workloads), page_size)

    @property
    def dtype(self) -> str:
        """What models compute in."""
        return self.settings["dtype"]

    def gate(self, servers: list[Server], shape: str, result: Result) -> list[Server]:
        """Every server against the truth, flows with a budget that covers everything, and one that does not.

        Returns:
            The servers that started; a second dense one may be missing from the machine, which is noted in `result`.

        Raises:
            EngineError: the first dense server or a flow did not start.
        """
        model = gate.write_gate_model(self.folder / "gate", shape, self.device)
        asked = gate.sequences(self.device, self.seed)
        wanted, largest = gate.truth(model, asked)
        allowed = 0.0
        runs = [(s, False) for s in servers] + [(s, True) for s in servers if s.flow][-1:]
        pool = ThreadPoolExecutor(self.gate_jobs)
        budgets = [SMALL_BUDGET if sees else gate.CONTEXT // self.page_size for _, sees in runs]
        jobs = [
            pool.submit(self._forced, server, model, asked, top_k, self.folder / f"gate{i}")
            for i, ((server, _), top_k) in enumerate(zip(runs, budgets, strict=True))
        ]
        try:
            for (server, sees), job in zip(runs, jobs, strict=True):
                try:
                    rows, counted = job.result()
                except EngineError as error:
                    if server.flow or not result.verdicts:
                        raise
                    result.skipped.append(_skip(shape, server, "every workload", f"the engine ended early: {error}"))
                    continue
                error = gate.distance(rows, wanted)
                if not result.verdicts:
                    allowed = gate.tolerance(error, largest, self.dtype)
                name = f"{server.name}, budget of a page" if sees else server.name
                result.verdicts.append(gate.Verdict(name, error, allowed, counted, sees))
        finally:
            pool.shutdown(cancel_futures=True)  # engines that have not started stay so
        missing = {skip["server"] for skip in result.skipped}
        return [server for server in servers if server.name not in missing]

    def _forced(
        self, server: Server, model: Path, asked: list[dict[str, Any]], top_k: int, folder: Path
    ) -> tuple[Any, Any]:
        console.print(f"gate: {server.name}, budget of {top_k} pages", highlight=False)
        paths = [folder / f"logits{i}" for i in range(len(asked))]
        engine = self.settings | server.engine | {
            "model_path": str(model), "load_format": "auto", "enable_custom_logit_processor": True,
            "context_length": gate.CONTEXT, "max_total_tokens": 4096,
        }  # fmt: skip
        if server.flow:
            engine["flow_config"] = {**server.engine["flow_config"], "top_k": top_k, "top_k_ratio": 0.0}
        force = [sequence | {"path": str(path)} for sequence, path in zip(asked, paths, strict=True)]
        events = run_engine({"engine": engine, "force": force, "workloads": []}, folder)
        counted = next(e["counted"] for e in events if e["event"] == "forced")
        try:
            return gate.load(paths, gate.NEW_TOKENS[self.device]), counted
        except RuntimeError as error:
            raise EngineError(str(error)) from error

    def measure(self, server: Server, shape: str, result: Result) -> None:
        """One server over all workloads; what does not fit or does not start is noted in `result`."""
        config = shapes.model_config(shape, self.context)
        model = shapes.write_model(self.folder / shape, config, self.dtype)
        job = {
            "engine": self.settings | server.engine | {"model_path": str(model)},
            "vocabulary": config["vocab_size"],
            "seed": self.seed,
            "new_tokens": self.new_tokens,
            "repeats": self.repeats,
            "workloads": [w.told(self.new_tokens + 1, self.page_size) for w in self.workloads],
        }
        try:
            events = run_engine(job, self.folder)
        except EngineError as error:
            result.skipped.append(_skip(shape, server, "every workload", f"the engine ended early: {error}"))
            return
        for event in events:
            if event["event"] == "started":
                result.machine |= {"sglang": event["version"]}
                result.settings["capacity"][f"{shape}, {server.name}"] = event["capacity"]
            elif event["event"] == "skipped":
                result.skipped.append(_skip(shape, server, event["name"], event["reason"]))
            elif event["event"] == "measured":
                found = {k: v for k, v in event.items() if k not in ("event", "name")}
                result.rows.append(Row(shape, event["name"], server.name, server.flow, **found))


def _skip(model: str, server: Server, workload: str, reason: str) -> dict[str, str]:
    return {"model": model, "server": server.name, "workload": workload, "reason": reason}


def machine(device: str) -> dict[str, Any]:
    """Where the run takes place."""
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    memory = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else None
    return {"device": name, "memory": memory, "torch": torch.__version__, "cuda": torch.version.cuda}


def run_all(bench: Bench, shape: str, models: list[str], servers: list[Server], alone: list[Server]) -> Result:
    """The gate with the heads of `shape`, `alone` in it as well, and, if green, every model on every server."""
    told = {"engine": bench.settings, "servers": [asdict(s) for s in servers], "new_tokens": bench.new_tokens}
    told |= {"workloads": [w.name for w in bench.workloads], "repeats": bench.repeats, "seed": bench.seed}
    result = Result(machine(bench.device), told | {"capacity": {}})
    try:
        found = bench.gate(alone + servers, shape, result)
        servers = [server for server in found if server not in alone]
    except EngineError as error:
        result.verdicts.clear()
        console.print(f"the gate's engine ended early:\n{error}", markup=False)
    for name in models if result.green else []:
        for server in servers:
            console.print(f"{name}: {server.name}", highlight=False)
            bench.measure(server, name, result)
    return result


def chosen(device: str, quick: bool, workload: list[str] | None) -> list[Workload]:
    """The workloads of a run."""
    usual = shapes.CPU_WORKLOADS if device == "cpu" else shapes.QUICK_WORKLOADS if quick else shapes.WORKLOADS
    return [shapes.parse_workload(text) for text in workload or usual]


def main(
    model: Annotated[list[str] | None, typer.Option(help="A shape; may be repeated.")] = None,
    flow: Annotated[list[str] | None, typer.Option(help="A flow; may be repeated.")] = None,
    dense: Annotated[list[str] | None, typer.Option(help="Dense attention backend of SGLang; may be repeated.")] = None,
    workload: Annotated[list[str] | None, typer.Option(help="BATCHxCONTEXT, such as 16x32k; may be repeated.")] = None,
    flow_config: Annotated[
        str | None,
        typer.Option(help="JSON object, as for SGLang's flag; without it top_k is 2,048 tokens, 4 pages on a CPU."),
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="GPUs of a server; above 1 the gate also runs them on one.")] = 1,
    gate_jobs: Annotated[int, typer.Option(min=1, help="Engines of the gate at a time.")] = 1,
    gate_only: Annotated[bool, typer.Option("--gate-only", help="Correctness only.")] = False,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda" if torch.cuda.is_available() else "cpu",
    quick: Annotated[bool, typer.Option("--quick", help="Three workloads of the smaller shape, fewer tokens.")] = False,
    seed: Annotated[int, typer.Option(help="Of prompts and forced tokens.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder for serving.json and serving.png.")] = Path("out"),
) -> None:
    """Measures stock SGLang dense and with flows. Exit status 1 if the gate is red or a flow counted no pages."""
    if device not in DEVICES:
        raise typer.BadParameter(f"--device is {device!r}, expected cuda or cpu")
    usual = ["tiny"] if device == "cpu" else ["Qwen3-1.7B"] if quick else ["Qwen3-1.7B", "Qwen3-8B"]
    models = model or usual
    new_tokens, repeats = (8, 3) if device == "cpu" else (32, 2) if quick else (128, 3)
    try:
        architecture = shapes.common_architecture(models)
        budget = json.loads(flow_config) if flow_config else {"top_k": architecture.top_k(device)}
        given = tuple(flow or architecture.flows), tuple(dense or architecture.dense[device]), budget
        servers, alone = shapes.parse_servers(*given, tp), shapes.parse_servers(*given) if tp > 1 else []
        workloads = chosen(device, quick, workload)
    except (BenchError, json.JSONDecodeError) as error:
        raise typer.BadParameter(str(error)) from error
    with tempfile.TemporaryDirectory(prefix="flowlib-serving-") as scratch:
        page_size = architecture.page_size[device]
        bench = Bench(device, workloads, new_tokens, repeats, seed, Path(scratch), page_size, gate_jobs)
        result = run_all(bench, models[0], [] if gate_only else models, servers, alone)
    render(result, console)
    for path in save(result, out):
        console.print(f"written: {path}")
    if not (result.green and (gate_only or (result.rows and result.proven))):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
