"""Compile Triton kernels for a GPU on a machine that has none, and say what they cost.

    with compile_only("sm_90") as kernels:
        launch_select(scores, ...)          # CPU tensors; compiles what a launch would, runs nothing
    print("\\n".join(report(kernels)))

Inside the block every ``kernel[grid](...)`` goes through the JIT's own specialisation (dtypes, divisibility by 16,
ones) and is compiled for the target instead of launched. It needs a process in which Triton does not interpret.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowlib.core.errors import BackendError, OptionError
from flowlib.runtime import interpreter

_ARCHITECTURES = {"sm_80": 80, "sm_89": 89, "sm_90": 90, "sm_100": 100}
SHARED_MEMORY_LIMIT = {"sm_80": 163 * 1024, "sm_89": 99 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024}
"""Bytes of shared memory one block can use."""

_device_numbers = itertools.count(1 << 20)  # a fresh number has no compiled kernels in the JIT's per-device cache


@dataclass(frozen=True)
class CompiledKernel:
    """What one compiled variant of a kernel costs.

    Attributes:
        name: of the ``@triton.jit`` function.
        target: ``"sm_90"``.
        registers: 32-bit registers a thread.
        spill_stores, spill_loads: bytes a thread moves to and from local memory for want of registers.
        shared_bytes: shared memory a block.
        num_warps, num_stages: launch options.
        matrix_ops: names of the tensor core instructions in the PTX.
        ptx: the PTX itself.
    """

    name: str
    target: str
    registers: int
    spill_stores: int
    spill_loads: int
    shared_bytes: int
    num_warps: int
    num_stages: int
    matrix_ops: tuple[str, ...]
    ptx: str = field(repr=False)

    @property
    def spills(self) -> int:
        """Bytes spilled, stores and loads together."""
        return self.spill_stores + self.spill_loads


class _TargetDriver:
    """Stands where Triton's CUDA driver does; knows its target and has no device."""

    def __init__(self, target: Any) -> None:
        self._target, self._device = target, next(_device_numbers)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return self._device

    def set_current_device(self, device: int) -> None:
        if device != self._device:
            raise BackendError(f"compile_only: there is no device {device}, nothing is launched")

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty


@contextmanager
def compile_only(target: str = "sm_90") -> Iterator[list[CompiledKernel]]:
    """Compile every kernel launched in the block for `target`; yields the list the results are added to.

    Args:
        target: ``"sm_80"``, ``"sm_89"``, ``"sm_90"`` or ``"sm_100"``.

    Raises:
        OptionError: the target is none of these.
        BackendError: Triton interprets kernels in this process, or NVIDIA's tools are missing from its wheel.
    """
    if target not in _ARCHITECTURES:
        raise OptionError(f"compile_only: target {target!r} is unknown, expected one of {', '.join(_ARCHITECTURES)}")
    if interpreter.requested() or interpreter.active():
        raise BackendError("compile_only: TRITON_INTERPRET is set; compiling needs a process of its own without it")
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    launch, previous = JITFunction.run, driver._active
    kernels: list[CompiledKernel] = []
    seen: set[str] = set()

    def compile_launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled: Any = launch(self, *args, grid=grid, warmup=True, **kwargs)
        if compiled.hash not in seen:
            seen.add(compiled.hash)
            kernels.append(_measure(compiled, target))
        return compiled

    with tempfile.TemporaryDirectory() as cache, knobs.cache.scope():
        knobs.cache.dir = cache
        driver._active = _TargetDriver(GPUTarget("cuda", _ARCHITECTURES[target], 32))  # type: ignore[assignment]
        JITFunction.run = compile_launch
        try:
            yield kernels
        finally:
            JITFunction.run = launch
            driver._active = previous


def report(kernels: list[CompiledKernel]) -> list[str]:
    """A table, one line a kernel under a heading."""
    heading = ("kernel", "target", "registers", "spilled B", "shared B", "warps", "stages", "matrix ops")
    rows: list[tuple[Any, ...]] = [heading]
    for k in kernels:
        ops = " ".join(k.matrix_ops) or "-"
        rows.append((k.name, k.target, k.registers, k.spills, k.shared_bytes, k.num_warps, k.num_stages, ops))
    widths = [max(len(str(row[i])) for row in rows) for i in range(len(heading))]
    return ["  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _measure(compiled: Any, target: str) -> CompiledKernel:
    ptx, metadata = compiled.asm["ptx"], compiled.metadata
    with tempfile.TemporaryDirectory() as folder:
        registers = _registers(compiled.asm["cubin"], Path(folder))
        stores, loads = _spills(ptx, Path(folder))
    return CompiledKernel(
        name=metadata.name, target=target, registers=registers, spill_stores=stores, spill_loads=loads,
        shared_bytes=metadata.shared, num_warps=metadata.num_warps, num_stages=metadata.num_stages,
        matrix_ops=tuple(sorted(set(re.findall(r"\b(?:wgmma|mma|tcgen05)\.[a-z_]*mma[a-z_]*|\bmma\.sync", ptx)))),
        ptx=ptx,
    )  # fmt: skip


def _tool(name: str) -> str:
    import triton.backends.nvidia as nvidia

    path = Path(nvidia.__file__).parent / "bin" / name
    if not path.exists():
        raise BackendError(f"compile_only: {name} is not in the triton package ({path})")
    return str(path)


def _registers(cubin: bytes, folder: Path) -> int:
    """Registers a thread, from the compiled binary."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    shown = subprocess.run([_tool("cuobjdump"), "--dump-resource-usage", path], capture_output=True, text=True)
    found = re.search(r"\bREG:(\d+)", shown.stdout)
    if found is None:
        raise BackendError(f"compile_only: cuobjdump reported no registers: {shown.stderr.strip()[:200]}")
    return int(found[1])


def _spills(ptx: str, folder: Path) -> tuple[int, int]:
    """(bytes stored, bytes loaded) by spills, from the assembler; newer PTX needs the newer of Triton's two."""
    source = folder / "kernel.ptx"
    source.write_text(ptx)
    architecture = ptx.split(".target", 1)[1].split(",")[0].split()[0]
    complaint = ""
    for name in ("ptxas", "ptxas-blackwell"):
        command = [_tool(name), "-v", f"--gpu-name={architecture}", source, "-o", folder / "kernel.o"]
        shown = subprocess.run(command, capture_output=True, text=True)
        found = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", shown.stderr)
        if shown.returncode == 0 and found:
            return int(found[1]), int(found[2])
        complaint = shown.stderr.strip()
    raise BackendError(f"compile_only: ptxas failed: {complaint[:200]}")
