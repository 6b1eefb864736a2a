"""A whole diffusers pipeline over shared weights (extra ``models``).

async with HostWeights(config) as host:
    loaded = await load_pipeline(host, "/models/FLUX.2-klein-4B")
    image = loaded.pipeline("a cat on a mat").images[0]
"""

import importlib
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread

from hostweights.actors import HostWeights, LoadedModel, list_components, load_diffusers
from hostweights.messages.config import Mode
from hostweights.messages.failure import Code, Stage, error

__all__ = ["LoadedPipeline", "load_pipeline"]


@dataclass(frozen=True, slots=True)
class LoadedPipeline:
    """A pipeline of the library's own class, and by name the components whose weights came through the host."""

    pipeline: Any  # the library's classes are untyped
    models: dict[str, LoadedModel]

    async def unload(self) -> None:
        """``HostWeights.unload`` of each component; idempotent."""
        for model in self.models.values():
            await model.unload()


async def load_pipeline(
    host: HostWeights,
    directory: str | Path,
    *,
    components: Collection[str] | None = None,
    variant: str | None = None,
    mode: Mode | None = None,
) -> LoadedPipeline:
    """Load a pipeline's directory: weights through the host, schedulers and tokenizers by the library itself.

    ``components`` are those whose weights come through the host (default: all that can); the library loads the rest.
    Nothing is fetched. The pipeline is made off the loop, which takes seconds. Raises what ``load_diffusers`` raises,
    source_missing for a directory that is no pipeline's and model_failed for what the library refuses; then, and on a
    cancel, nothing stays loaded.
    """
    names = await anyio.to_thread.run_sync(list_components, directory)
    if not names:
        if await anyio.to_thread.run_sync((Path(directory) / "model_index.json").is_file):
            text = f"{directory} is a pipeline's directory without components to load; save the whole pipeline there"
        else:
            text = f"{directory} is no pipeline's directory (it has no model_index.json); load it with load_diffusers"
        raise error(Stage.SOURCE, Code.SOURCE_MISSING, text, file=directory)
    models: dict[str, LoadedModel] = {}
    try:
        for name in names if components is None else components:
            models[name] = await load_diffusers(host, directory, component=name, variant=variant, mode=mode)
        pipeline = await anyio.to_thread.run_sync(partial(_assemble, Path(directory), models, variant))
    except BaseException:
        for model in models.values():
            await model.unload()
        raise
    return LoadedPipeline(pipeline, models)


def _assemble(directory: Path, models: dict[str, LoadedModel], variant: str | None) -> object:
    library = importlib.import_module("diffusers")
    modules = {name: model.module for name, model in models.items()}
    try:
        pipeline: object = library.DiffusionPipeline.from_pretrained(
            directory, variant=variant, local_files_only=True, use_safetensors=True, trust_remote_code=False, **modules
        )
    except Exception as failed:
        text = f"diffusers could not make the pipeline of {directory}: {type(failed).__name__}: {failed}"
        raise error(Stage.PLANNING, Code.MODEL_FAILED, text, file=directory) from failed
    return pipeline
