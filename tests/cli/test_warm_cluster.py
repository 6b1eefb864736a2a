"""C6: what the nodes of a cluster answer, whatever one of them prints; Ray itself is run in tests/gather."""

import sys
from types import SimpleNamespace

import pytest

from hostweights.commands.cluster import warm_cluster

WARMED = '[{"name": "m", "key": "k"}]\n'
ANSWERS: dict[str, tuple[int, str, str]] = {
    "clean": (0, WARMED, ""),
    "prints": (0, f"loading\nweights...\n{WARMED}", ""),
    "prints after": (0, f"{WARMED}bye\n", ""),
    "other json": (0, "[1, 2]\n", ""),
    "silent": (0, "", ""),
    "refused": (2, "", "error: no"),
}


def cluster_of(answers: dict[str, tuple[int, str, str]]) -> SimpleNamespace:
    """As much of Ray as the command uses: a node for each answer; the task itself does not run."""
    nodes = [{"NodeID": name, "NodeManagerHostname": f"host of {name}", "Alive": True} for name in answers]
    scheduled = SimpleNamespace(
        options=lambda scheduling_strategy: SimpleNamespace(remote=lambda *_: scheduling_strategy)
    )
    return SimpleNamespace(
        init=lambda **_: None,
        shutdown=lambda: None,
        nodes=lambda: nodes,
        remote=lambda **_: lambda _: scheduled,
        wait=lambda handles, num_returns: (handles[:num_returns], handles[num_returns:]),
        get=lambda name: answers[name],
    )


def test_C6_a_node_that_prints_stops_no_other_and_its_result_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", cluster_of(ANSWERS))
    strategies = SimpleNamespace(NodeAffinitySchedulingStrategy=lambda node_id, soft: node_id)  # noqa: ARG005 - Ray's
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", strategies)
    told: list[str] = []
    results = {result.node: result for result in warm_cluster(["warm"], told.append)}
    assert results.keys() == ANSWERS.keys()
    for name in ("clean", "prints"):
        assert results[name].failure is None
        assert results[name].warmed == [{"name": "m", "key": "k"}]
    for name, end in (("prints after", "'bye'"), ("other json", "'[1, 2]'"), ("silent", "''")):
        assert results[name].warmed == []
        assert f"but in {end}" in (results[name].failure or "")
    assert results["refused"].failure == "error: no"
    assert len(told) == 1 + len(ANSWERS)
