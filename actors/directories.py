"""Loading what diffusers and transformers have saved, by directory alone."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from ..hwr.directories import ModelSource as ModelSource
from ..hwr.directories import component_names, model_source
from ..hwr.records import generic_record
from ..hwr.skeleton import build_skeleton
from ..hwr.source_memory import SourceMemory
from ..messages.config import Mode
from ..messages.failure import Code, Stage
from .api import HostWeights, LoadedModel
from .ports.faults import answered


async def load_diffusers(
    host: HostWeights,
    directory: str | Path,
    *,
    component: str | None = None,
    variant: str | None = None,
    dtype: torch.dtype | None = None,
    mode: Mode | None = None,
    timeout_s: float | None = None,
) -> LoadedModel:
    """Load one component of a pipeline's directory, or the model that a directory holds by itself.

    The module is the library's own class in evaluation mode, each tensor in the dtype that the directory stores, or in
    ``dtype``: then under an identity of its own, and without what the class keeps in FP32. Every other component keeps
    its own loader: hand the module to the pipeline's ``from_pretrained``. ``variant`` chooses one of several sets of
    weights ("fp16"). Raises what ``describe_directory`` and ``HostWeights.load`` raise.
    """
    return await _load(host, _Asked(directory, component, variant, dtype), mode, timeout_s)


async def load_transformers(
    host: HostWeights,
    directory: str | Path,
    *,
    variant: str | None = None,
    dtype: torch.dtype | None = None,
    mode: Mode | None = None,
    timeout_s: float | None = None,
) -> LoadedModel:
    """Load the model of a transformers directory, as ``load_diffusers`` loads a component."""
    return await _load(host, _Asked(directory, None, variant, dtype), mode, timeout_s)


class _Asked(msgspec.Struct, frozen=True):
    """The arguments that say which model of a directory is meant."""

    directory: str | Path
    component: str | None
    variant: str | None
    dtype: torch.dtype | None

    def find(self, memory: SourceMemory | None) -> ModelSource:
        with answered(Stage.PLANNING, Code.MODEL_FAILED, f"the model in {self.directory} could not be described"):
            return model_source(Path(self.directory), self.component, self.variant, self.dtype, memory)


async def _load(host: HostWeights, asked: _Asked, mode: Mode | None, timeout_s: float | None) -> LoadedModel:
    # The libraries' imports take seconds, so that the loop must not wait for them.
    found = await host._describe(asked.find, mode)  # noqa: SLF001  # a part of a load like the rest of it
    return await host.load(
        found.factory, found.source, record=found.record, name=found.name, mode=mode, timeout_s=timeout_s
    )


def describe_directory(
    directory: str | Path,
    component: str | None = None,
    variant: str | None = None,
    dtype: torch.dtype | None = None,
) -> ModelSource:
    """The class, files, name and record of the model in a directory; blocking, no weight is read.

    Raises source_missing, source_corrupt, source_ambiguous when a pipeline has several components and none is named,
    unsupported for a class that the libraries lack, and model_failed when the class refuses its configuration.
    """
    return _Asked(directory, component, variant, dtype).find(None)


def list_components(directory: str | Path) -> tuple[str, ...]:
    """The components of a pipeline's directory that ``load_diffusers`` can load; none for a model's own directory."""
    return component_names(Path(directory))


def describe_factory(factory: Callable[[], torch.nn.Module], source: str | Path) -> ModelSource:
    """A model that ``factory`` builds, whose names are the checkpoint's, with a record by discovery.

    Raises model_failed when the factory fails.
    """
    with answered(Stage.PLANNING, Code.MODEL_FAILED, "the model's factory failed; correct it and try again"):
        skeleton = build_skeleton(factory)
    return ModelSource(factory, Path(source), type(skeleton).__name__, generic_record(skeleton))
