"""One process of the memory suite: load MiniLM one way, answer once, and say what that cost.

Reads ``measure`` and ``finish`` lines; prints a JSON line each. The baseline is taken after all imports and after small
models of the same kind were built, on the CPU and on meta, and one was run, so that it holds what any process pays
without weights. (The first model on meta costs a process most of a second and some 65 MB for torch's meta kernels;
hostweights does not need them.)
"""

import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from hostweights import BERT_ENCODER, Config, Mode, open_sync
from hostweights.demo.encoder import Encoder, EncoderConfig, read_config
from hostweights.demo.weights import WEIGHTS, answer, find_model, tokenize

Loader = Callable[[Path, Path], Iterator[torch.nn.Module]]


def counters() -> dict[str, int]:
    """Anonymous bytes, PSS, and what other processes map too, of this process."""
    fields: dict[str, int] = {}
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]:
        name, value, _ = line.split()
        fields[name.rstrip(":")] = int(value) * 1024
    return {
        "private_bytes": fields["Anonymous"],
        "pss_bytes": fields["Pss"],
        "shared_bytes": fields["Shared_Clean"] + fields["Shared_Dirty"],
    }


def resident(*, peak: bool) -> int:
    """Resident bytes of this process, shared pages and all: now, or the most since ``forget_peak``."""
    name = "VmHWM:" if peak else "VmRSS:"
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def forget_peak() -> None:
    """Begin the count of the most resident bytes anew."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


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


@contextmanager
def torch_load_mapped(model: Path, root: Path) -> Iterator[torch.nn.Module]:
    """torch's own format, mapped and assigned to a module on meta; the suite has saved it beside the store."""
    with torch.device("meta"):
        module = Encoder(read_config(model))
    state = torch.load(root.parent / TORCH_FILE, mmap=True, weights_only=True)
    module.load_state_dict(state, strict=False, assign=True)
    yield module


@contextmanager
def from_pretrained(model: Path, root: Path) -> Iterator[torch.nn.Module]:  # noqa: ARG001  one signature for all
    """transformers' own loader of its own class."""
    yield Plain(import_bert().from_pretrained(model).eval())


class Plain(torch.nn.Module):
    """A transformers encoder that answers with its hidden states alone."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Token ids and mask -> hidden states."""
        hidden: torch.Tensor = self.module(ids, mask).last_hidden_state
        return hidden


def import_bert() -> Any:  # noqa: ANN401 - a class of an extra
    """transformers' BertModel, which imports itself when it is asked for."""
    return importlib.import_module("transformers").BertModel


TORCH_FILE = "model.pt"
PRETRAINED = "transformers from_pretrained"
LOADERS = {
    "hostweights, streamed": hostweights_streamed,
    "hostweights, mapped": hostweights_mapped,
    "load_file + load_state_dict": load_file_copied,
    "load_file + assign": load_file_assigned,
    "torch.load(mmap=True) + assign": torch_load_mapped,
    PRETRAINED: from_pretrained,
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
    if sys.argv[1] == PRETRAINED:
        import_bert()
    before = counters()
    forget_peak()
    resident_before = resident(peak=False)
    started_s = time.perf_counter()
    with loader(model, root) as module:
        load_s = time.perf_counter() - started_s
        answer(module, batch)
        print(json.dumps({"load_s": load_s}), flush=True)
        sys.stdin.readline()
        after = counters()
        grown = {name: after[name] - before[name] for name in after}
        grown["peak_bytes"] = resident(peak=True) - resident_before
        print(json.dumps(grown | {"anonymous_in_mapping": mapped(root)}), flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    main()
