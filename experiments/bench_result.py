"""What every benchmark's result has: machine, settings, a gate and notes; as JSON, beside a picture."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench_gate import Verdict, worst
from rich.box import SIMPLE_HEAD
from rich.table import Table


@dataclass
class BenchResult:
    """What a run found; each benchmark adds its rows.

    Attributes:
        machine: GPU, versions.
        settings: the command line.
        verdicts: of the gate.
        notes: what was not measured, and why.
    """

    machine: dict[str, object]
    settings: dict[str, object]
    verdicts: list[Verdict] = field(default_factory=list, kw_only=True)
    notes: list[str] = field(default_factory=list, kw_only=True)

    @property
    def green(self) -> bool:
        """Whether the gate saw something and nothing wrong."""
        return bool(self.verdicts) and all(v.ok for v in self.verdicts)

    def note(self, text: str) -> None:
        """Adds a note once."""
        if text not in self.notes:
            self.notes.append(text)

    def as_json(self, measured: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """The result with what was measured; behind a red gate nothing but the gate."""
        verdicts = [dataclasses.asdict(v) for v in self.verdicts]
        found = {
            "machine": self.machine, "settings": self.settings, "gate": {"green": self.green, "verdicts": verdicts},
            "notes": self.notes,
        }  # fmt: skip
        return found | dict(measured()) if self.green else found

    def save(
        self, folder: Path, name: str, told: Callable[[], Mapping[str, Any]], draw: Callable[[Path], None] | None
    ) -> list[Path]:
        """Writes what `told` says as ``<name>.json`` and, with matplotlib, what `draw` draws as ``<name>.png``.

        An old picture goes.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path, drawn = folder / f"{name}.json", folder / f"{name}.png"
        drawn.unlink(missing_ok=True)
        if draw is not None:
            try:
                draw(drawn)
            except ImportError:
                self.note("matplotlib is not installed: no picture")
        path.write_text(json.dumps(plain(told()), indent=1) + "\n", encoding="utf-8")
        return [path, drawn] if drawn.exists() else [path]


def plain(value: Any) -> Any:
    """What JSON can hold: infinities and NaN as text."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, (str, int, float)) else str(value)


def gate_table(verdicts: Sequence[Verdict]) -> Table:
    """The worst row of each flow and stage."""
    table = Table(title="Gate: sampled rows against a float64 reference", title_justify="left", box=SIMPLE_HEAD)
    for name in ("flow", "stage", "worst at", "row"):
        table.add_column(name, no_wrap=True)
    for name in ("error", "tolerance"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("", "note"):
        table.add_column(name)
    for v in worst(verdicts):
        verdict = "ok" if v.ok else "FAILED"
        table.add_row(v.flow, v.stage, v.shape, v.row, f"{v.error:.2e}", f"{v.tolerance:.2e}", verdict, v.note)
    return table
