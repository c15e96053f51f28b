"""Runs stock SGLang in a process of its own: a scheduler that crashes takes its parent with it."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flowlib_cpu_host import cpu_environment

HERE = Path(__file__).resolve().parent
ENGINE = {
    "device": "cpu",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "disable_cuda_graph": True,
    "max_total_tokens": 16384,
    "mem_fraction_static": 0.3,
    "random_seed": 1,
}
SERVE_FLAGS = ["--device", "cpu", "--dtype", "float32", "--skip-tokenizer-init", "--disable-cuda-graph"]
SERVE_FLAGS += ["--max-total-tokens", "16384", "--mem-fraction-static", "0.3"]
SERVE = [str(Path(sys.executable).with_name("sglang")), "serve", "--model-type", "llm", *SERVE_FLAGS]


@dataclass(frozen=True)
class Ended:
    """A process that has ended: exit code and everything it printed."""

    code: int
    text: str


def run(command, timeout, env=None, cwd=None):
    """Runs a command; when its time is over, it and all its children are killed and the test fails."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=cpu_environment(env),
        cwd=cwd,
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        kill_group(process)
        text, _ = process.communicate()
        raise AssertionError(f"{command} ran longer than {timeout} s:\n{text[-4000:]}") from None
    finally:
        kill_group(process)
    return Ended(process.returncode, text)


def kill_group(process):
    """Ends a process and what it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def generate(folder, waves, env=None, timeout=200, **engine):
    """Starts an engine, sends it waves of prompts (lists of token ids) and returns its answers, wave by wave.

    Each wave is ``(prompts, new_tokens)``; an answer has ``output_ids`` and ``cached_tokens``. What ``/server_info``
    would say is left in ``info.json``.
    """
    job, answers = folder / "job.json", folder / "answers.json"
    folder.mkdir(parents=True, exist_ok=True)
    job.write_text(json.dumps({"engine": ENGINE | engine, "waves": waves}))
    ended = run([sys.executable, str(HERE / "engine_job.py"), str(job), str(answers)], timeout, env)
    assert ended.code == 0, ended.text[-6000:]
    return json.loads(answers.read_text())


def read_trace(path):
    """The lines of a trace."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def with_plugin(folder, name):
    """Environment in which SGLang also finds the test plugin ``plugins/<name>.py``."""
    package = folder / f"{name}-0.0.dist-info"
    package.mkdir(parents=True, exist_ok=True)
    (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.0\n")
    (package / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {name}:register\n")
    parts = [str(folder), str(HERE / "plugins"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(part for part in parts if part)}
