"""Repeated materialisation beside repeated views: one process that loads MiniLM again and again.

``python -m benchmarks.retention WAY STORE ITERATIONS`` is the fresh process of one way; it prints a JSON line for each
load: private, shared and PSS bytes over what the process had before the first. A way either lets each model go before
it loads the next, or keeps them all.
"""

import gc
import json
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks.memory_worker import counters
from hostweights import BERT_ENCODER, Config, Mode, open_sync
from hostweights.demo.encoder import Encoder, read_config
from hostweights.demo.weights import WEIGHTS, answer, find_model, tokenize

Row = dict[str, object]
ITERATIONS = 8
COPIES_DROPPED, COPIES_KEPT = "materialised, let go", "materialised, all kept"
VIEWS_DROPPED, VIEWS_KEPT = "views, let go", "views, all kept"
WAYS = (COPIES_DROPPED, COPIES_KEPT, VIEWS_DROPPED, VIEWS_KEPT)
_SETTLED = 2
"""Loads after which allocators have what they keep."""


def rows(root: Path, iterations: int) -> list[Row]:
    """All ways, each in its own process."""
    found: list[Row] = []
    for way in WAYS:
        command = [sys.executable, "-m", "benchmarks.retention", way, str(root), str(iterations)]
        done = subprocess.run(command, capture_output=True, check=True, text=True)
        found += [{"loader": "retention", "way": way, **json.loads(line)} for line in done.stdout.splitlines()]
    return found


def growth(rows: list[Row], way: str) -> float:
    """Private bytes that each further load adds, once allocators have what they keep."""
    private = [int(str(row["private_bytes"])) for row in rows if row["way"] == way][_SETTLED - 1 :]
    return (private[-1] - private[0]) / (len(private) - 1)


def materialised(model: Path) -> Generator[torch.nn.Module, None, None]:
    """Copies in private memory, as a plain loader makes them."""
    while True:
        module = Encoder(read_config(model))
        module.load_state_dict(load_file(model / WEIGHTS), strict=False)
        yield module


def viewed(model: Path, root: Path) -> Generator[torch.nn.Module, None, None]:
    """Views of the store's pages."""
    config = read_config(model)
    with open_sync(Config(root=str(root), mode=Mode.REQUIRED)) as host:
        while True:
            loaded = host.load(lambda: Encoder(config), model, record=BERT_ENCODER)
            yield loaded.module
            if sys.argv[1] == VIEWS_DROPPED:
                host.unload(loaded)


def main() -> None:
    """Load, compute, say, and let go or keep."""
    way, root, iterations = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    model = find_model(None)
    batch = tokenize(model)
    kept: list[torch.nn.Module] = []
    before = counters()
    models = viewed(model, root) if way in (VIEWS_DROPPED, VIEWS_KEPT) else materialised(model)
    for number in range(iterations):
        module = next(models)
        answer(module, batch)
        if way in (COPIES_KEPT, VIEWS_KEPT):
            kept.append(module)
        gc.collect()
        after = counters()
        print(json.dumps({"load": number + 1} | {name: after[name] - before[name] for name in after}), flush=True)
        del module
    models.close()


if __name__ == "__main__":
    main()
