"""RELIABILITY.md: every case has a test, and every test, file and command that it names is there."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "RELIABILITY.md").read_text(encoding="utf-8")
CASES = [f"T{number:02}" for number in range(1, 85)]
OUT_OF_REACH = re.compile(r"out of reach: \S.*")
"""How the line of a case without a test begins its second column; the reason follows."""


def names_of_tests() -> set[str]:
    """The names of all tests."""
    sources = (ROOT / "tests").rglob("test_*.py")
    return {
        name for path in sources for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
    }


def uncovered(text: str, functions: set[str]) -> list[str]:
    """Cases that are missing from the table, or have neither a test nor a reason why not."""
    rows = dict(re.findall(r"^\| (T\d\d) \| (.+) \|$", text, re.MULTILINE))
    named = {case for name in functions for case in re.findall(r"(?<=_)T\d\d(?=_)", name)}
    return [case for case in CASES if case not in rows or not (case in named or OUT_OF_REACH.match(rows[case]))]


def test_every_case_has_a_test_that_carries_its_number() -> None:
    assert uncovered(TEXT, names_of_tests()) == []
    assert re.findall(r"^\| (T\d\d) \|", TEXT, re.MULTILINE) == CASES


def test_a_case_without_a_test_or_a_line_is_found() -> None:
    functions = {name for name in names_of_tests() if "T55" not in name}
    assert uncovered(TEXT, functions) == ["T55"]
    without = TEXT.replace("| T56 |", "|")
    assert uncovered(without, functions) == ["T55", "T56"]
    excused = re.sub(r"\| T55 \|.*\|", "| T55 | out of reach: needs two machines |", TEXT)
    assert uncovered(excused, functions) == []


def test_every_path_that_is_named_is_there() -> None:
    named = set(re.findall(r"`((?:tests|examples|benchmarks|docs|fuzz|hwr|dlo|actors|messages)/[\w./-]*)`", TEXT))
    assert len(named) > 30
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_every_promise_names_a_test() -> None:
    rows = re.findall(r"^\| \*\*.*\|$", TEXT, re.MULTILINE)
    assert len(rows) > 25
    for row in rows:
        columns = [column.strip() for column in row.strip("|").split(" | ")]
        assert len(columns) == 4, row
        assert re.search(r"`tests/[\w/]+\.py`", columns[1]), row
        assert columns[2], row


def test_every_make_target_is_there_and_takes_its_variables() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = re.findall(r"(?:^|`)make (\w+)(?: (\w+)=)?", TEXT, re.MULTILINE)
    assert {target for target, _ in named} >= {"test", "torture", "soak", "simulate"}
    for target, variable in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
        assert not variable or f"$({variable})" in makefile, variable


@pytest.mark.parametrize("variable", sorted(set(re.findall(r"HOSTWEIGHTS_[A-Z_]+", TEXT))))
def test_every_variable_is_read_somewhere(variable: str) -> None:
    found = subprocess.run(
        ["grep", "-rlw", variable, "tests", "src", "actors", "hwr"], cwd=ROOT, capture_output=True, check=False
    )
    assert found.stdout
