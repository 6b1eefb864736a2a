"""D2: what a process that starts warm imports: the code of what it does, and nothing that it could do."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from hostweights import Config, open_sync
from hostweights.hwr import source_memory
from tiny_model import factory, make_checkpoint

HELPERS = Path(__file__).resolve().parents[1] / "helpers"
WARM_START = """
import json, sys
from tiny_model import factory
before = set(sys.modules)
from hostweights import Config, Mode, load_diffusers, load_transformers, open_sync
with open_sync(Config(root=sys.argv[2], mode=Mode.REQUIRED)) as host:
    model = host.load(factory(), sys.argv[1])
    assert model.warm
    host.unload(model)
new = set(sys.modules) - before
compiled = [
    f"{name}.{kind.__qualname__}"
    for name in sorted(new) if name.partition(".")[0] == "hostweights"
    for kind in vars(sys.modules[name]).values()
    if isinstance(kind, type) and kind.__module__ == name and "__dataclass_fields__" in vars(kind)
]
print(json.dumps({"new": sorted(new), "compiled": compiled}))
"""
NOT_NEEDED = (
    "hostweights.actors.groups",
    "hostweights.actors.kernel.journal",
    "hostweights.actors.kernel.replay",
    "hostweights.actors.ports.devices",
    "hostweights.actors.ports.packed",
    "hostweights.actors.ports.sources",
    "hostweights.actors.warming",
    "hostweights.actors.waves",
    "hostweights.cli",
    "hostweights.dlo",
    "hostweights.hwr.adapters",
    "hostweights.hwr.capacity",
    "hostweights.hwr.fp8",
    "hostweights.hwr.load",
    "hostweights.hwr.memory",
    "hostweights.hwr.packed.codec",
    "hostweights.hwr.packed.producer",
    "hostweights.hwr.planner",
    "hostweights.hwr.publication",
    "hostweights.hwr.read_ahead",
    "hostweights.hwr.remote",
    "hostweights.hwr.scrub",
    "hostweights.hwr.source",
    "hostweights.hwr.staging",
    "hostweights.hwr.transforms",
    "hostweights.hwr.upkeep",
    "hostweights.hwr.writer",
)
FOREIGN = ("aiofiles", "diffusers", "fsspec", "rich", "safetensors", "statistics", "transformers", "typer")


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    folder = tmp_path_factory.mktemp("warm-start")
    source, root = make_checkpoint(folder), folder / "store"
    with pytest.MonkeyPatch.context() as patch, open_sync(Config(root=str(root))) as host:
        patch.setattr(source_memory, "SETTLED_NS", -1)  # the checkpoint is as new as the test
        host.adopt(host.load(factory(), source))
    done = subprocess.run(
        [sys.executable, "-c", WARM_START, str(source), str(root)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(HELPERS), *sys.path])},
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def test_D2_a_warm_start_imports_nothing_that_streams_publishes_fetches_or_replays(
    started: dict[str, list[str]],
) -> None:
    assert [name for name in NOT_NEEDED if find_spec(name) is None] == [], "renamed: name it anew here"

    assert [name for name in NOT_NEEDED if name in started["new"]] == []


def test_D2_a_warm_start_imports_no_package_that_only_other_work_needs(started: dict[str, list[str]]) -> None:
    assert [name for name in FOREIGN if name in started["new"]] == []


def test_D2_no_class_of_a_warm_start_is_compiled_when_it_is_imported(started: dict[str, list[str]]) -> None:
    assert started["compiled"] == [], "a dataclass compiles its methods at every import; write it as a msgspec.Struct"
