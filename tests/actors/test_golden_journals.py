"""D3: six scenarios in three journal versions stand as files; today's actors do what they record."""

from pathlib import Path

import pytest

import golden
from hostweights.actors.kernel.journal_file import JournalReader
from hostweights.actors.kernel.replay_diff import actors_of
from hostweights.hwr.policy import decide
from hostweights.messages.config import Mode
from hostweights.messages.journal import JournalHeader
from hostweights.messages.report import Action, Condition
from hostweights.pytest_plugin import Replay, replay

__all__ = ["replay"]

FOLDER = Path(__file__).parent / "journals"
FILES = [FOLDER / version / f"{name}.journal" for version in ("v1", "v2", "v3") for name in golden.SCENARIOS]
IDS = [f"{path.parent.name}-{path.stem}" for path in FILES]


@pytest.mark.parametrize("journal", FILES, ids=IDS)
def test_D3_golden_scenarios_replay(journal: Path, replay: Replay) -> None:
    names = actors_of(journal)
    assert names == ("transport", "store", "resolver", "publisher")
    for name in names:
        assert replay(journal, name).num_handlers > 0
    with JournalReader(journal) as reader:
        header = next(iter(reader))
    assert isinstance(header, JournalHeader)
    assert f"v{header.version}" == journal.parent.name


@pytest.mark.parametrize("name", golden.SCENARIOS)
def test_D3_the_golden_scenarios_are_those_of_today(name: str, tmp_path: Path) -> None:
    """Recording one again gives the same records, ids that are drawn aside."""
    again = tmp_path / "again.journal"
    again.write_bytes(golden.record(name))
    kinds = []
    for path in (again, *(FOLDER / version / f"{name}.journal" for version in ("v2", "v3"))):
        with JournalReader(path) as reader:
            kinds.append([type(record).__name__ for record in reader])
    assert kinds[0] == kinds[1] == kinds[2]


def test_D3_a_changed_policy_shows_as_a_readable_diff(
    replay: Replay,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stricter(mode: Mode, condition: Condition) -> Action:
        return Action.FAIL if condition is Condition.INVALID else decide(mode, condition)

    monkeypatch.setattr("hostweights.actors.resolution.decide", stricter)
    with pytest.raises(pytest.fail.Exception) as found:
        replay(FOLDER / "v3" / "corruption.journal", "resolver")
    text = str(found.value)
    assert "actor 'resolver' does something else than record" in text
    changed = [line for line in text.splitlines() if line[:2] in ("- ", "+ ")]
    assert '-     "type": "resolver.effect.canonical",' in changed, text
    assert '+       "action": "fail",' in changed, text
