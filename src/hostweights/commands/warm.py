"""``hostweights warm``: publish a checkpoint ahead of time, so that no worker on this host starts cold."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hostweights.commands.layered import layered_config
from hostweights.commands.progress import Work
from hostweights.commands.refusals import AsJson, Debug, print_json, refuse_unused, refusing, root_path
from hostweights.messages.config import PackingPolicy, Representation

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from hostweights.actors import ModelSource, Warmed
    from hostweights.messages.config import Config


class Dtype(StrEnum):
    """The dtypes of ``--dtype``, as torch names them."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


def warm(
    context: typer.Context,
    directory: Annotated[
        Path, typer.Argument(help="A diffusers or transformers directory; with --factory any safetensors checkpoint.")
    ],
    root: Annotated[
        Path | None,
        typer.Option(
            help="The store to publish into (default: the setting root).", envvar="HOSTWEIGHTS_ROOT", parser=root_path
        ),
    ] = None,
    component: Annotated[
        list[str] | None, typer.Option(help="Component of a pipeline; may be repeated (default: all of them).")
    ] = None,
    variant: Annotated[str | None, typer.Option(help="One of several sets of weights, such as fp16.")] = None,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Cast floating tensors, but for those that the class keeps in FP32.")
    ] = None,
    factory: Annotated[
        str | None, typer.Option(help="MODULE:CALLABLE that builds the model, for a class of your own.")
    ] = None,
    tp_size: Annotated[int, typer.Option(min=1, help="Publish the share of each of so many ranks.")] = 1,
    packing: Annotated[
        PackingPolicy | None,
        typer.Option(help="on: bf16 blocks packed without loss; auto: for models that are mostly bf16 [default: off]."),
    ] = None,
    representation: Annotated[
        Representation | None,
        typer.Option(help="How values are stored; FP8 needs the extra quant [default: final]."),
    ] = None,
    ray: Annotated[
        bool, typer.Option("--ray", help="Publish on every node of the Ray cluster that RAY_ADDRESS names.")
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Publish a checkpoint without a serving model, in bounded memory.

    Nothing is done for an artifact that is there. The setting mode is for loads: this publishes in every one. Exit code
    0 when every artifact is ready, 2 on bad input or a failure, 130 when interrupted; then nothing half-made is left.
    With --ray the exit code is 2 if any node failed.

    Example: hostweights warm /models/FLUX.2-klein-4B --root /var/cache/hostweights --component transformer
    """
    from rich.console import Console

    errors = Console(stderr=True, emoji=False)
    with refusing(debug=debug):
        if ray:
            _everywhere(errors)
        if factory is not None:
            refuse_unused(context, ("component", "variant"), "is for a directory's own classes, and --factory is given")
        config = layered_config(root, production__packing=packing, representation=representation)
        found = _sources(directory, component or [], variant, dtype, factory)
        results = _warm_all(config, found, tp_size, errors)
    if as_json:
        print_json(results)
    else:
        _show(Console(emoji=False), results)


def _everywhere(errors: "Console") -> None:
    """The same command line on every node; ends the command. Prints one JSON object a node."""
    import sys

    import msgspec

    from hostweights.commands.cluster import warm_cluster

    words = [word for word in sys.argv[1:] if word not in {"--ray", "--json"}]
    results = warm_cluster(
        [*words, "--json"], lambda text: errors.print(text, markup=False, highlight=False, soft_wrap=True)
    )
    for result in results:
        typer.echo(msgspec.json.encode(result).decode())
    raise typer.Exit(2 if any(result.failure is not None for result in results) else 0)


def _sources(
    directory: Path, components: list[str], variant: str | None, dtype: Dtype | None, factory: str | None
) -> "list[ModelSource]":
    from hostweights.actors import describe_directory, list_components
    from hostweights.actors.directories import describe_factory
    from hostweights.messages.failure import Code, Stage, error

    if factory is not None and dtype is not None:
        text = "--dtype is for the classes of a directory; with --factory, build the model in that dtype"
        raise error(Stage.CONFIGURATION, Code.INVALID_CONFIG, text)
    if factory is not None:
        from hostweights.commands.named import callable_named

        return [describe_factory(callable_named("--factory", factory), directory)]
    wanted = None if dtype is None else _torch_dtype(dtype)
    names = components or list_components(directory)
    if not names:
        return [describe_directory(directory, None, variant, wanted)]
    return [describe_directory(directory, name, variant, wanted) for name in names]


def _torch_dtype(dtype: Dtype) -> "torch.dtype":
    import torch

    match dtype:
        case Dtype.FLOAT32:
            return torch.float32
        case Dtype.FLOAT16:
            return torch.float16
        case Dtype.BFLOAT16:
            return torch.bfloat16


def _warm_all(config: "Config", found: "list[ModelSource]", tp_size: int, errors: "Console") -> "list[Warmed]":
    from hostweights.actors import warm as publish
    from hostweights.actors.warming import PlainBudget

    budget = PlainBudget()
    results: list[Warmed] = []
    with cancelled_by_signals(budget.cancel), Work(errors) as work:
        for each in found:
            for rank in range(tp_size):
                show = partial(_show_step, work, each.name if tp_size == 1 else f"{each.name} rank {rank}")
                record = each.record.for_rank(tp_size, rank)
                results.append(
                    publish(
                        config, each.factory, each.source, record=record, name=each.name, budget=budget, progress=show
                    )
                )
    return results


def _show_step(work: Work, name: str, step: str, done: int, total: int) -> None:
    work.show(f"{name}: {step}", done, total)


@contextmanager
def cancelled_by_signals(cancel: "Callable[[], None]") -> Iterator[None]:
    """An interrupt ends the work between two chunks, with everything put away."""
    import signal

    kept = {number: signal.signal(number, lambda *_: cancel()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _show(console: "Console", results: "list[Warmed]") -> None:
    for result in results:
        how = "published" if result.built else "published by another process" if result.joined else "already there"
        rank = f" (rank {result.tp_rank} of {result.tp_size})" if result.tp_size > 1 else ""
        size = f"{result.size_bytes / 2**20:.1f} MiB, {result.tensors} tensors, {result.blocks} blocks"
        console.print(f"{result.name}{rank}: {how}, {size}, {result.seconds:.1f} s", highlight=False, markup=False)
        console.print(f"  {result.directory}", highlight=False, markup=False, soft_wrap=True)
        for assumption in result.assumptions:
            console.print(f"  assumed: {assumption}", highlight=False, markup=False, soft_wrap=True)
