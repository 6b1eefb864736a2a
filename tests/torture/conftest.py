"""The tallies, after the results: what was done how often, and what came of it."""

import pytest

from torture import TALLIES


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for name, counts in TALLIES.items():
        terminalreporter.write_line(
            f"torture, {name}: " + ", ".join(f"{count} {what}" for what, count in counts.items())
        )
