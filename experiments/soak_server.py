"""The server of `soak.py`: stock ``sglang serve`` with a flow and the checker, in a process group of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench_serving_gate as gate
import psutil
import soak_check
from bench_serving_shapes import PAGE

HERE = Path(__file__).resolve().parent
START_SECONDS = 300
EXIT_SECONDS = 10.0


class ServerError(Exception):
    """The server did not start or did not answer; the message has the end of its log."""


@dataclass(frozen=True)
class Settings:
    """What the server is started with; see the options of `soak.py`."""

    flow: str
    flow_config: str
    model: str
    device: str
    pool_tokens: int

    @property
    def dtype(self) -> str:
        """What the model computes in."""
        return "bfloat16" if self.device == "cuda" else "float32"


class Server:
    """A running server; use as a context, whose end kills what is left of it.

    Args:
        settings: what it is started with.
        folder: for the model, the log and the checker's answers.

    Raises:
        ServerError: it does not start.
    """

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings, self.folder = settings, folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.model = folder / "model"
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Server:
        model = gate.write_gate_model(self.model, self.settings.model, self.settings.device)
        self._log = (self.folder / "log").open("w", encoding="utf-8")
        self._process = subprocess.Popen(
            self._command(model), stdout=self._log, stderr=subprocess.STDOUT, env=self._environment(),
            start_new_session=True,
        )  # fmt: skip
        try:
            self._wait_until_healthy()
        except BaseException:  # an interrupted start, too, must leave no server behind
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def _command(self, model: Path) -> list[str]:
        settings = self.settings
        words = [sys.executable, "-c", "from sglang.cli.main import main; main()", "serve", "--model-type", "llm"]
        words += ["--model-path", str(model), "--port", str(self.port), "--device", settings.device]
        words += ["--dtype", settings.dtype, "--skip-tokenizer-init", "--grammar-backend", "none"]
        words += ["--page-size", str(PAGE), "--max-total-tokens", str(settings.pool_tokens), "--enable-metrics"]
        words += ["--context-length", str(2 * settings.pool_tokens), "--chunked-prefill-size", "256"]
        words += ["--mem-fraction-static", "0.3", "--max-running-requests", "64", "--decode-log-interval", "4"]
        words += ["--schedule-conservativeness", "0.1"]  # it takes in more than fits, and has to retract
        words += ["--flow", settings.flow, "--flow-config", settings.flow_config]
        return words + (["--disable-cuda-graph"] if settings.device == "cpu" else [])

    def _environment(self) -> dict[str, str]:
        """SGLang finds the checker as it finds any plugin: by the entry point of an installed package."""
        package = self.folder / "soak_check-0.0.dist-info"
        package.mkdir(exist_ok=True)
        (package / "METADATA").write_text("Metadata-Version: 2.1\nName: soak_check\nVersion: 0.0\n", encoding="utf-8")
        (package / "entry_points.txt").write_text(
            "[sglang.srt.plugins]\nsoak_check = soak_check:register\n", encoding="utf-8"
        )
        env = dict(os.environ)
        if self.settings.device == "cpu":
            from flowlib_cpu_host import cpu_environment

            env = cpu_environment()
        parts = [str(self.folder), str(HERE), *env.get("PYTHONPATH", "").split(os.pathsep)]
        paths = os.pathsep.join(part for part in parts if part)
        longer = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}  # so that the pool, not the model, is what ends
        return env | longer | {"PYTHONPATH": paths, "SOAK_CHECK": str(self.folder)}

    def _wait_until_healthy(self) -> None:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            if self._process.poll() is not None:
                break
            with suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                urllib.request.urlopen(self.url + "/health", timeout=20).close()
                return
            time.sleep(0.5)
        raise ServerError(f"the server did not start:\n{self.tail()}")

    def tail(self) -> str:
        """The end of its log."""
        return (self.folder / "log").read_text(encoding="utf-8")[-4000:]

    async def look(self) -> dict[str, Any]:
        """What the checker finds once the server is idle. Raises ServerError."""
        asked, answer = self.folder / soak_check.ASKED, self.folder / soak_check.ANSWER
        answer.unlink(missing_ok=True)
        asked.touch()
        for _ in range(600):
            if answer.exists():
                return json.loads(answer.read_text(encoding="utf-8"))
            if self._process.poll() is not None:
                break
            await asyncio.sleep(0.1)
        raise ServerError(f"the scheduler did not become idle, or ended:\n{self.tail()}")

    def kill_scheduler(self) -> dict[str, Any]:
        """Kills the scheduler; says how the server ended and what was left of it after ten seconds."""
        family = psutil.Process(self._process.pid).children(recursive=True)
        schedulers = [child for child in family if "scheduler" in " ".join(child.cmdline())]
        if not schedulers:
            raise ServerError(f"no scheduler among {[' '.join(child.cmdline()) for child in family]}")
        begin = time.monotonic()
        schedulers[0].kill()
        try:
            code = self._process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        seconds = time.monotonic() - begin
        _, alive = psutil.wait_procs(family, timeout=max(0.1, EXIT_SECONDS - seconds))
        return {"code": code, "seconds": round(seconds, 2), "left": [" ".join(child.cmdline()) for child in alive]}
