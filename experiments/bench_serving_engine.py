"""One SGLang engine of the serving benchmark, in a process of its own: `python bench_serving_engine.py JOB.json`.

The job names what the engine is started with, and then either sequences to be forced through it (the gate: the raw log
probabilities of every step go to files) or workloads to be measured. One line of JSON per event, after `EVENT`.
"""

from __future__ import annotations

import asyncio
import glob
import itertools
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

Prompts = list[list[int]]


class RecordAndForce:
    """Appends the log probabilities of each request's step to its file, then forces the next token of its list.

    The step is the number of rows the file has: SGLang's own count lags behind when it schedules ahead. With tensor
    parallelism every rank is called; those after the first have files of their own.
    """

    def __call__(self, logits: Any, custom_param_list: list[dict[str, Any]]) -> Any:
        """Called by SGLang with logits `[requests, vocabulary]` before anything else touches them."""
        import os

        import torch

        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        for row, params in zip(logits, custom_param_list, strict=True):
            raw = row.double().log_softmax(0).cpu().numpy()
            path = f"{params['path']}.rank{rank}" if rank else params["path"]
            size = os.path.getsize(path) if os.path.exists(path) else 0
            step = size // raw.nbytes
            with open(path, "ab") as file:
                file.write(raw.tobytes())
            if step < len(params["force"]):
                chosen = row[params["force"][step]].clone()
                row.fill_(-float("inf"))
                row[params["force"][step]] = chosen
        return logits


def tell(event: str, **more: Any) -> None:
    """One event for the benchmark."""
    print("EVENT", json.dumps({"event": event, **more}), flush=True)


def force(engine: Any, sequences: Sequence[dict[str, Any]]) -> None:
    """Sends all prompts at once; each is answered with its own tokens."""
    import dill

    for sequence in sequences:
        path = glob.escape(sequence["path"])
        for old in glob.glob(path) + glob.glob(f"{path}.rank*"):
            os.unlink(old)
    engine.generate(
        input_ids=[sequence["prompt"] for sequence in sequences],
        sampling_params=[
            {
                "temperature": 0.0,
                "max_new_tokens": len(sequence["force"]),
                "ignore_eos": True,
                "custom_params": {"path": sequence["path"], "force": sequence["force"]},
            }
            for sequence in sequences
        ],
        custom_logit_processor=json.dumps({"callable": dill.dumps(RecordAndForce).hex()}),
    )


def make_prompts(batch: int, context: int, vocabulary: int, seed: int) -> Prompts:
    """Random token ids, the same for every server."""
    source = random.Random(f"{seed} {batch} {context}")
    return [[source.randrange(2, vocabulary) for _ in range(context)] for _ in range(batch)]


def answers(tokens: int) -> dict[str, Any]:
    """Greedy decoding of exactly so many tokens."""
    return {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}


def stream(engine: Any, prompts: Prompts, tokens: int) -> list[list[tuple[float, int]]]:
    """Sends all prompts at once; for each, when how many of its tokens had come, in seconds from the sending."""

    async def one(prompt: list[int], begin: float) -> list[tuple[float, int]]:
        chunks = await engine.async_generate(input_ids=prompt, sampling_params=answers(tokens), stream=True)
        return [(time.perf_counter() - begin, len(chunk["output_ids"])) async for chunk in chunks]

    async def all_of_them() -> list[list[tuple[float, int]]]:
        begin = time.perf_counter()
        return await asyncio.gather(*(one(prompt, begin) for prompt in prompts))

    return engine.loop.run_until_complete(all_of_them())


def steady_gaps(times: Sequence[Sequence[tuple[float, int]]]) -> list[float]:
    """Seconds per token of each request, between the last request's first token and the first one's last."""
    begin, end = max(t[0][0] for t in times), min(t[-1][0] for t in times)
    gaps: list[float] = []
    for request in times:
        inside = [chunk for chunk in request if begin <= chunk[0] <= end]
        for (t0, n0), (t1, n1) in itertools.pairwise(inside):
            gaps += [(t1 - t0) / (n1 - n0)] * (n1 - n0) if n1 > n0 else []
    return gaps


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def measure(engine: Any, prompts: Prompts, new_tokens: int, repeats: int) -> dict[str, Any]:
    """Latencies in seconds and decoded tokens per second of one workload.

    The first wave prefills the prompts: its first tokens are TTFT. The radix cache keeps the prompts, so all later
    waves decode at once; the difference of two lengths of answers is decoding alone.
    """
    ttft = [request[0][0] for request in stream(engine, prompts, 1)]
    engine.generate(input_ids=prompts, sampling_params=answers(4))

    def seconds(tokens: int) -> float:
        begin = time.perf_counter()
        engine.generate(input_ids=prompts, sampling_params=answers(tokens))
        return time.perf_counter() - begin

    pairs = [(seconds(1), seconds(1 + new_tokens)) for _ in range(repeats)]
    steps = sorted((long - short) / new_tokens for short, long in pairs)
    step = statistics.median(steps)
    gaps = steady_gaps(stream(engine, prompts, 1 + new_tokens)) or [step]
    return {
        "tokens_per_second": len(prompts) / step,
        "step": step,
        "steps": steps,
        "ttft": [percentile(ttft, 0.5), percentile(ttft, 0.95)],
        "tpot": [percentile(gaps, 0.5), percentile(gaps, 0.95)],
    }


def pages(patience: float = 5.0) -> dict[str, int]:
    """What flowlib's counters say, once an idle scheduler has published them; empty for a dense server."""
    from prometheus_client import CollectorRegistry
    from prometheus_client.multiprocess import MultiProcessCollector

    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    before: dict[str, int] | None = None
    end = time.monotonic() + patience
    while True:
        samples = [s for metric in registry.collect() for s in metric.samples if s.name.startswith("flowlib:")]
        now = {s.name.removeprefix("flowlib:").removesuffix("_total"): int(s.value) for s in samples}
        if now == before or not now or time.monotonic() > end:
            return now
        before = now
        time.sleep(0.5)


def measure_all(engine: Any, job: dict[str, Any], capacity: int) -> None:
    """Measures every workload of the job that the KV pool has room for."""
    for workload in job["workloads"]:
        batch, context, name = workload["batch"], workload["context"], workload["name"]
        needed = workload["tokens"]
        if needed > capacity:
            tell("skipped", name=name, reason=f"needs {needed:,} tokens, the KV pool has {capacity:,}")
            continue
        before = pages()
        prompts = make_prompts(batch, context, job["vocabulary"], job["seed"])
        found = measure(engine, prompts, job["new_tokens"], job["repeats"])
        engine.flush_cache()
        if found["step"] <= 0:
            tell("skipped", name=name, reason=f"longer answers took no longer: {found['steps']} seconds a token")
            continue
        after = pages()
        counted = {key: value - before.get(key, 0) for key, value in after.items()}
        tell("measured", name=name, counted=counted, **found)


def main(job_path: str) -> None:
    """Runs the job."""
    import sglang

    with open(job_path, encoding="utf-8") as file:
        job = json.load(file)
    engine = sglang.Engine(**job["engine"])
    info = engine.get_server_info()
    capacity = info["max_total_num_tokens"]
    tell("started", capacity=capacity, version=info["version"], served=info.get("flow_served"))
    if job.get("force"):
        force(engine, job["force"])
        tell("forced", counted=pages())
    measure_all(engine, job, capacity)
    tell("done")
    engine.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
    sys.stdout.flush()
    os._exit(0)
