"""What ``hostweights push`` and ``hostweights pull`` share: one move with its bar, its failure and its line."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from hostweights.actors.remote import Moved, Progress
    from hostweights.actors.warming import PlainBudget

_INTERRUPTED = 130


def run_move(move: "Callable[[PlainBudget, Progress], Moved]", verb: str, *, as_json: bool, debug: bool) -> None:
    """Carry out one move and show it. Exits with 2 on a failure, 130 when interrupted."""
    import msgspec
    from rich.console import Console

    from hostweights.actors.warming import PlainBudget
    from hostweights.commands.warm import cancelled_by_signals, transfer_bar
    from hostweights.messages.failure import Code, HostWeightsError

    errors, budget = Console(stderr=True), PlainBudget()
    try:
        with cancelled_by_signals(budget.cancel), transfer_bar(errors) as bar:
            task = bar.add_task(verb, total=None)
            moved = move(budget, lambda done, total: bar.update(task, completed=done, total=total))
    except HostWeightsError as failed:
        if debug:
            raise
        text = f"error: {failed} [{failed.failure.stage}/{failed.code}]"
        errors.print(text, markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(_INTERRUPTED if failed.code is Code.CANCELLED else 2) from None
    if as_json:
        typer.echo(msgspec.json.encode(moved).decode())
        return
    how = "already there" if moved.already else verb
    line = f"{moved.name}: {how}, {moved.size_bytes / 2**20:.1f} MiB, {moved.seconds:.1f} s"
    Console().print(line, highlight=False, markup=False)
    Console().print(f"  {moved.directory}", highlight=False, markup=False, soft_wrap=True)
