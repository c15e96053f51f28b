"""Running Python in a process of its own, with the flowlib of this checkout."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def python(*arguments: object, **environment: str) -> str:
    """Standard output of ``python arguments...``; fails with its standard error."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, **environment}
    done = subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout
