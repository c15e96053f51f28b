"""Many requests of random lengths against stock SGLang with a flow, its KV pool kept nearly full, faults among them.

Over HTTP: shared prefixes, streams whose client goes away, requests aborted while they decode, malformed ones, some
longer than the pool. Afterwards the idle scheduler recomputes every summary it holds and says where each token of the
pool is (`soak_check.py`), probes must have the answers they had alone, log probabilities are compared with the model in
float64 (near with a budget that covers every request, visibly off with another), and a scheduler that is killed must
take the server with it. ``python experiments/soak.py`` (2,000 requests; 150 on a CPU).
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import soak_truth
import torch
import typer
from rich.console import Console
from soak_report import Outcome, judge, render
from soak_requests import Asker, Mix
from soak_server import Server, ServerError, Settings

console = Console() if Console().is_terminal else Console(width=150)


async def soak(server: Server, mix: Mix, concurrency: int) -> Outcome:
    """Probes alone, then everything at once, then the checks of an idle server."""
    outcome = Outcome()
    async with Asker(server.url, mix.vocabulary) as asker:
        outcome.alone = [await asker.probe(probe) for probe in mix.probes]
        watching = asyncio.create_task(asker.watch_usage(outcome))
        gate = asyncio.Semaphore(concurrency)

        async def one(index: int) -> None:
            async with gate:
                outcome.add(await asker.ask(mix.request(index)))

        await asyncio.gather(*(one(index) for index in range(mix.count)))
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        outcome.busy = await server.look()
        await asker.flush()
        outcome.idle = await server.look()
        outcome.compared = await compared(server, asker, outcome)
    outcome.killed = await asyncio.to_thread(server.kill_scheduler)
    return outcome


async def compared(server: Server, asker: Asker, outcome: Outcome) -> soak_truth.Compared | None:
    """Answers given under load, scored anew by the idle server's prefill, and both against the truth; `None` without
    an answer."""
    answers, settings = soak_truth.taken(outcome.of("plain", "stream", "probe")), server.settings
    if not answers:
        return None
    prefilled = [await asker.prefilled(answer.request.prompt, answer.tokens) for answer in answers]
    longest_dense = await asyncio.to_thread(soak_truth.sparse_above, server.url)
    return await asyncio.to_thread(
        soak_truth.compare, server.model, answers, prefilled, longest_dense, settings.dtype, settings.device
    )


def main(
    flow: Annotated[str, typer.Option(help="The flow to decode with.")] = "gqa_quest_sparse_attention",
    flow_config: Annotated[str, typer.Option(help="JSON object, as for SGLang's flag.")] = '{"top_k": 8}',
    model: Annotated[str | None, typer.Option(help="A shape of bench_serving.py; its heads, 3 layers.")] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="How many requests are sent.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Most requests under way at once.")] = 64,
    pool_tokens: Annotated[int, typer.Option(min=2048, help="Tokens of the KV pool.")] = 8192,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda" if torch.cuda.is_available() else "cpu",
    seed: Annotated[int, typer.Option(help="Of prompts, lengths and faults.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder for soak.json.")] = Path("out"),
) -> None:
    """Runs the soak. Exit status 1 unless every check is green."""
    if device not in ("cuda", "cpu"):
        raise typer.BadParameter(f"--device is {device!r}, expected cuda or cpu")
    settings = Settings(flow, flow_config, model or ("Qwen3-1.7B" if device == "cuda" else "tiny"), device, pool_tokens)
    mix = Mix(requests or (2000 if device == "cuda" else 150), pool_tokens, seed)
    with tempfile.TemporaryDirectory(prefix="flowlib-soak-") as scratch:
        try:
            with Server(settings, Path(scratch)) as server:
                outcome = asyncio.run(soak(server, mix, concurrency))
        except ServerError as error:
            console.print(str(error), markup=False, highlight=False)
            raise typer.Exit(1) from error
    verdicts = judge(outcome, mix, settings.dtype)
    render(verdicts, console)
    out.mkdir(parents=True, exist_ok=True)
    told = {"flow": flow, "flow_config": flow_config, "device": device, "pool_tokens": pool_tokens, "seed": seed}
    saved = told | {"requests": mix.count, "verdicts": [asdict(verdict) for verdict in verdicts]}
    (out / "soak.json").write_text(json.dumps(saved, indent=1), encoding="utf-8")
    if not all(verdict.ok for verdict in verdicts):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
