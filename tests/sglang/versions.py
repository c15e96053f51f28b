"""The versions of SGLang that the plugin is tested with: the environment's, and others in folders of their own."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class SGLang:
    """One version.

    Args:
        version: its number.
        folder: where it lies, when it is not the environment's.
        steps_past_the_end: decode steps that the overlap schedule runs for a request whose last token is on its way.
    """

    version: str
    folder: Path | None = None
    steps_past_the_end: int = 0

    def environment(self, base=None):
        """Variables with which a process imports this version: those of `base` (``os.environ``), and a search path."""
        env = dict(os.environ if base is None else base)
        if self.folder is not None:
            parts = [str(self.folder), env.get("PYTHONPATH", "")]
            env["PYTHONPATH"] = os.pathsep.join(part for part in parts if part)
        return env

    def check(self):
        """Fails unless it is there; skips where it can't be."""
        if self.folder is None or (self.folder / "sglang").is_dir():
            return
        if sys.version_info < (3, 11):
            pytest.skip(f"SGLang {self.version} needs Python 3.11")
        pytest.fail(f"SGLang {self.version} is not in {self.folder}: run make env")


VERSIONS = (SGLang("0.5.16", steps_past_the_end=1), SGLang("0.5.23", Path(sys.prefix) / "sglang-0.5.23"))
