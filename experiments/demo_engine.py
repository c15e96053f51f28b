"""One SGLang engine of the demo, in a process of its own: `python demo_engine.py JOB.json`.

The job says how to start the engine, which text to continue and for how many tokens. A custom logit processor writes
the raw logits of every step to a file and then, if the job has tokens to force, makes the engine take them. One line of
JSON is printed per event, after `EVENT`.
"""

import json
import os
import sys
import time
from typing import Any


class RecordAndForce:
    """Appends the raw logits of a step to a file, then forces the next token of a list.

    The step is the number of rows the file has: SGLang's own count lags behind when it schedules ahead.
    """

    def __call__(self, logits: Any, custom_param_list: list[dict[str, Any]]) -> Any:
        """Called by SGLang with logits `[1, vocabulary]` before anything else touches them."""
        import os

        params, row = custom_param_list[0], logits[0]
        raw = row.float().cpu().numpy()
        size = os.path.getsize(params["path"]) if os.path.exists(params["path"]) else 0
        step = size // raw.nbytes
        with open(params["path"], "ab") as file:
            file.write(raw.tobytes())
        if step < len(params["force"]):
            chosen = row[params["force"][step]].clone()
            row.fill_(-float("inf"))
            row[params["force"][step]] = chosen
        return logits


def tell(event: str, **more: Any) -> None:
    """One event for the demo."""
    print("EVENT", json.dumps({"event": event, **more}), flush=True)


def main(job_path: str) -> None:
    """Runs the job; the last event holds the tokens and the seconds between the first and the last of them."""
    import dill
    import sglang

    with open(job_path, encoding="utf-8") as file:
        job = json.load(file)
    engine = sglang.Engine(**job["engine"])
    tell("started")
    chunks = engine.generate(
        input_ids=job["prompt"],
        sampling_params={
            "temperature": 0.0,
            "max_new_tokens": job["tokens"],
            "ignore_eos": True,
            "custom_params": {"path": job["logits"], "force": job["force"]},
        },
        custom_logit_processor=json.dumps({"callable": dill.dumps(RecordAndForce).hex()}),
        stream=True,
    )
    times, tokens = [], []
    for chunk in chunks:
        tokens = chunk["output_ids"]
        times.append((len(tokens), time.perf_counter()))
        tell("token", count=len(tokens))
    (first, begin), (last, end) = times[0], times[-1]
    tell("done", tokens=tokens, steps=last - first, seconds=end - begin)
    engine.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
    sys.stdout.flush()
    os._exit(0)
