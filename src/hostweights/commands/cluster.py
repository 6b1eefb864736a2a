"""``hostweights warm --ray``: the same command on every node of a Ray cluster, one task a node."""

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from hostweights.messages.failure import Code, Stage, error


@dataclass(frozen=True, slots=True)
class NodeResult:
    """What the command said on one node: ``warmed`` as its JSON has it, or ``failure`` in its own words."""

    node: str
    host: str
    warmed: list[dict[str, object]]
    failure: str | None


def run_command(arguments: Sequence[str], folder: str) -> tuple[int, str, str]:
    """On a node: run ``hostweights`` in a process of its own; exit code, output, errors."""
    done = subprocess.run(  # noqa: S603 - our own command line, no shell
        [sys.executable, "-m", "hostweights", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder if Path(folder).is_dir() else None,
    )
    return done.returncode, done.stdout, done.stderr


def warm_cluster(arguments: Sequence[str], say: Callable[[str], None]) -> list[NodeResult]:
    """Run ``hostweights`` with ``arguments``, which print JSON last, on every live node of the cluster at RAY_ADDRESS.

    ``say`` is told as nodes end. A node that fails or is lost does not stop the others. The checkpoint's path must
    lead to it on every node. Raises HostWeightsError(unsupported) without Ray or without a cluster.
    """
    ray = _connected()
    try:
        place = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
        task = ray.remote(num_cpus=0, max_retries=0)(run_command)
        nodes = [node for node in ray.nodes() if node["Alive"]]
        waiting = {}
        for node in nodes:
            strategy = place(node_id=node["NodeID"], soft=False)
            handle = task.options(scheduling_strategy=strategy).remote(list(arguments), str(Path.cwd()))
            waiting[handle] = node
        say(f"warming {len(nodes)} nodes")
        results: list[NodeResult] = []
        while waiting:
            (ended, *_), _ = ray.wait(list(waiting), num_returns=1)
            results.append(_result(ray, ended, waiting.pop(ended)))
            how = results[-1].failure or "ready"
            say(f"{len(results)} of {len(nodes)}: {results[-1].host}: {how}")
        return sorted(results, key=lambda result: result.node)
    finally:
        ray.shutdown()


def _connected() -> Any:  # noqa: ANN401 - Ray is optional and carries no types that hold without it
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as missing:
        text = f"--ray needs Ray ({missing}); pip install hostweights[ray]"
        raise error(Stage.CONFIGURATION, Code.UNSUPPORTED, text) from missing
    address = os.environ.get("RAY_ADDRESS", "auto")
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as failed:
        text = f"there is no Ray cluster at {address!r} ({failed}); start one, or set RAY_ADDRESS to its address"
        raise error(Stage.CONFIGURATION, Code.UNSUPPORTED, text) from failed
    return ray


def _result(ray: Any, ended: object, node: dict[str, Any]) -> NodeResult:  # noqa: ANN401 - as above
    name, host = str(node["NodeID"]), str(node["NodeManagerHostname"])
    try:
        code, output, errors = ray.get(ended)
    except Exception as lost:  # noqa: BLE001 - Ray's own error types: the node or its worker is gone
        return NodeResult(name, host, [], f"lost: {type(lost).__name__}: {lost}".splitlines()[0])
    if code:
        return NodeResult(name, host, [], errors.strip() or f"exit code {code}")
    last = output.rstrip().rpartition("\n")[2]  # a factory may print, and does so before the result
    try:
        return NodeResult(name, host, msgspec.json.decode(last, type=list[dict[str, object]]), None)
    except msgspec.MsgspecError:
        text = f"its output does not end in a line of JSON but in {last[-200:]!r}; print nothing after the result"
        return NodeResult(name, host, [], text)
