"""One process of the memory suite: load MiniLM one way, answer once, and say what that cost.

Reads ``measure`` and ``finish`` lines; prints a JSON line each. The baseline is taken after all imports and after small
models of the same kind were built, on the CPU and on meta, and one was run, so that it holds what any process pays
without weights. (The first model on meta costs a process most of a second and some 65 MB for torch's meta kernels;
hostweights does not need them.)
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file

from hostweights import BERT_ENCODER, Config, Mode, open_sync
from hostweights.demo.encoder import Encoder, EncoderConfig, read_config
from hostweights.demo.weights import WEIGHTS, answer, find_model, tokenize

Loader = Callable[[Path, Path], Iterator[torch.nn.Module]]


def counters() -> dict[str, int]:
    """Anonymous bytes and PSS of this process."""
    fields: dict[str, int] = {}
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]:
        name, value, _ = line.split()
        fields[name.rstrip(":")] = int(value) * 1024
    return {"private_bytes": fields["Anonymous"], "pss_bytes": fields["Pss"]}


def mapped(directory: Path) -> int:
    """Anonymous bytes inside the mappings of a directory's files."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        words = line.split()
        if "-" in words[0]:
            inside = str(directory) in line
        elif inside and words[0] == "Anonymous:":
            total += int(words[1]) * 1024
    return total


@contextmanager
def hostweights_streamed(model: Path, root: Path) -> Iterator[torch.nn.Module]:
    """A warm start from the store, blocks streamed through two slots."""
    config = read_config(model)
    with open_sync(Config(root=str(root), mode=Mode.REQUIRED)) as host:
        loaded = host.load(lambda: Encoder(config), model, record=BERT_ENCODER)
        host.attach(loaded)
        yield loaded.module


@contextmanager
def hostweights_mapped(model: Path, root: Path) -> Iterator[torch.nn.Module]:
    """A warm start from the store, computing from the mapped pages."""
    config = read_config(model)
    with open_sync(Config(root=str(root), mode=Mode.REQUIRED)) as host:
        yield host.load(lambda: Encoder(config), model, record=BERT_ENCODER).module


@contextmanager
def load_file_copied(model: Path, root: Path) -> Iterator[torch.nn.Module]:  # noqa: ARG001  one signature for all
    """safetensors' load_file, copied into an initialised module: what a plain loader does."""
    module = Encoder(read_config(model))
    module.load_state_dict(load_file(model / WEIGHTS), strict=False)
    yield module


@contextmanager
def load_file_assigned(model: Path, root: Path) -> Iterator[torch.nn.Module]:  # noqa: ARG001  one signature for all
    """safetensors' load_file, its private mapping assigned to a module on meta."""
    with torch.device("meta"):
        module = Encoder(read_config(model))
    module.load_state_dict(load_file(model / WEIGHTS), strict=False, assign=True)
    yield module


LOADERS = {
    "hostweights, streamed": hostweights_streamed,
    "hostweights, mapped": hostweights_mapped,
    "load_file + load_state_dict": load_file_copied,
    "load_file + assign": load_file_assigned,
}


def main() -> None:
    """Measure, say, wait, say."""
    loader, root = LOADERS[sys.argv[1]], Path(sys.argv[2])
    model = find_model(None)
    batch = tokenize(model)
    small = EncoderConfig(
        vocab_size=30522,
        hidden_size=12,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=12,
        max_position_embeddings=512,
    )
    answer(Encoder(small), batch)
    with torch.device("meta"):
        Encoder(small)
    before = counters()
    started_s = time.perf_counter()
    with loader(model, root) as module:
        load_s = time.perf_counter() - started_s
        answer(module, batch)
        print(json.dumps({"load_s": load_s}), flush=True)
        sys.stdin.readline()
        after = counters()
        grown = {name: after[name] - before[name] for name in after}
        print(json.dumps(grown | {"anonymous_in_mapping": mapped(root)}), flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    main()
