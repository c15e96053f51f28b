"""The pages of the docs folder say what the code does."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from flowlib import ops
from flowlib.core.op import Op
from flowlib.errors import OptionError
from flowlib.testing import document
from tests.processes import ROOT, python
from tests.refusals import refused

PAGE = ROOT / "docs" / "ops.md"


def test_the_page_of_ops_is_what_the_definitions_say():
    hint = "write it anew: python -m flowlib.testing.document --write docs/ops.md"
    assert PAGE.read_text(encoding="utf-8") == document.page(), hint


def test_every_exported_op_is_on_the_page():
    exported = {n for n in ops.__all__ if isinstance(getattr(ops, n), type) and issubclass(getattr(ops, n), Op)}
    assert exported == set(ops.__all__)
    shown = set(re.findall(r"^\| `(\w+)\(", document.page(), re.M)) | set(re.findall(r"<br>`(C\w+)`", document.page()))
    assert shown == exported


def test_every_op_is_documented_by_its_definition():
    """A meaning, and shapes that its own `infer` gave."""
    rows = [line for line in document.page().splitlines() if line.startswith("| `")]
    assert len(rows) == len(document.families())
    for row in rows:
        _, _, shapes, formats, meaning, runs, _ = (cell.strip() for cell in re.split(r"(?<!\\)\|", row))
        assert "→" in shapes, row
        assert formats, row
        assert len(meaning) > 3, row
        assert runs.startswith(("fused", "`kernels.", "other ops")), row


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("GeMM", "x `[., Nx, K]`, y `[., Ny, K]` → `[., Ny, Nx]`"),
        ("Transpose", "x `[., r, c]` → `[., c, r]`"),
        ("Sum", "dim 0: x `[S, r, c]` → `[B, r, c]`"),
        ("MaxInterleave", "dim 1: x `[., r, c]` → `[., r/k, c]`"),
        ("Kron", "dim (1, 2): x `[., Nx, K]`, y `[., Ny, K]` → `[., Nx·Ny, K·K]`"),
        ("topK", "x `[S, n, 1]` → `o`"),
    ],
)
def test_shapes_are_asked_from_the_op(name, shown):
    row = next(line for line in document.page().splitlines() if line.startswith(f"| `{name}("))
    assert shown in row


def test_an_op_whose_arguments_can_not_be_tried_is_named():
    class Odd(Op):
        def __init__(self, strange):
            self.strange = strange

    with refused(OptionError, "Odd: no sample of its argument 'strange'", "SAMPLES"):
        list(document.instances(Odd))


def test_the_page_is_printed_or_written(tmp_path):
    assert python("-m", "flowlib.testing.document") == document.page()
    assert python("-m", "flowlib.testing.document", "--write", tmp_path / "ops.md") == ""
    assert (tmp_path / "ops.md").read_text(encoding="utf-8") == document.page()
    wrong = subprocess.run(
        [sys.executable, "-m", "flowlib.testing.document", "--wrong"], capture_output=True, text=True, cwd=ROOT
    )
    assert (wrong.returncode, wrong.stderr.startswith("usage:")) == (2, True)


@pytest.mark.parametrize("page", sorted(Path(ROOT, "docs").glob("*.md")), ids=lambda p: p.name)
def test_pages_speak_of_the_project_alone(page):
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"(?<![\w.`/])/(work|tmp|root|home)/", text)
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"
