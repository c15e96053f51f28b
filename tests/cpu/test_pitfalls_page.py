"""docs/pitfalls.md has every number once, and every test it names is there."""

import ast
import re

import pytest

from tests.processes import ROOT

PAGE = (ROOT / "docs" / "pitfalls.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\| \d.*\|$", PAGE, re.M)]
ELSEWHERE = ("**GPU**", "**server**")


def defined(path) -> set[str]:
    """Names of functions a file defines, and what it imports from the shared suites."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.name for alias in node.names}
    return names


TESTS = {name for path in (ROOT / "tests" / "cpu").glob("test_pitfalls_*.py") for name in defined(path)}


def test_every_number_has_one_row():
    assert [int(row[0]) for row in ROWS] == list(range(1, 58))


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_what_shows_it_exists(row):
    _, failure, here, shown = row
    assert failure
    assert here
    named = re.findall(r"`([^`]+)`", shown)
    assert named, "names a test"
    for name in named:
        if "::" in name:
            path, function = name.split("::")
            assert function in defined(ROOT / path), name
        else:
            assert any(test.startswith(f"{name}_") for test in TESTS), f"no test starts with {name}"


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_row_without_a_test_of_its_number_says_what_it_needs(row):
    own = f"test_pitfall_{int(row[0]):02d}"
    if own not in row[3]:
        assert any(word in row[2] for word in ELSEWHERE), f"{own} is not named, and neither a GPU nor a server is"


def test_every_numbered_test_is_on_the_page():
    numbers = {re.match(r"test_pitfall_(\d\d)_", name)[0][:-1] for name in TESTS if name.startswith("test_pitfall_")}
    assert len(numbers) >= 50
    for name in numbers:
        assert f"`{name}`" in PAGE, name
