"""The compiler's last step: source text to a module on disk to kernels. The only step that needs Triton."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from flowlib.core.errors import BackendError


def cache_dir() -> Path:
    """Where generated modules lie: ``FLOWLIB_CACHE_DIR``, else ``flowlib`` in the user's cache home."""
    chosen = os.environ.get("FLOWLIB_CACHE_DIR")
    if chosen:
        return Path(chosen) / "kernels"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flowlib" / "kernels"


def source_path(source: str) -> Path:
    """The file of a source text: named by its first docstring word and its content; same source, same file."""
    title = re.match(r'"""(\w+)', source)
    return cache_dir() / f"{title.group(1).lower() if title else 'kernels'}_{source_digest(source)}.py"


def source_digest(source: str) -> str:
    """The content address of a source text."""
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def write_source(source: str) -> Path:
    """Writes a source text to its file, atomically, unless it is there.

    Raises:
        BackendError: the cache directory can't be written.
    """
    path = source_path(source)
    try:
        if path.exists() and path.read_text() == source:
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with os.fdopen(handle, "w") as file:
            file.write(source)
        os.replace(temporary, path)
    except OSError as error:
        raise BackendError(
            f"generated kernels can't be written to {path.parent}: {error.strerror}; "
            "set FLOWLIB_CACHE_DIR to a directory that can be written"
        ) from error
    return path


def load_source(source: str) -> ModuleType:
    """The module of a source text; written at the first call, imported once per process."""
    name = f"flowlib_generated_{source_digest(source)}"
    if name in sys.modules:
        return sys.modules[name]
    path = write_source(source)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise BackendError(f"{path} can't be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[name] = module
    return module


def load_function(import_string: str) -> Callable[..., Any]:
    """The object behind ``module:name``."""
    module, _, name = import_string.partition(":")
    return getattr(importlib.import_module(module), name)
