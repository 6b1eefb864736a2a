"""What ``hostweights push`` and ``hostweights pull`` share: one move with its progress, its failure and its line."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from hostweights.commands.progress import Work
from hostweights.commands.refusals import print_json, refusing

if TYPE_CHECKING:
    from hostweights.actors.remote import Moved, Progress
    from hostweights.actors.warming import PlainBudget


def run_move(move: "Callable[[PlainBudget, Progress], Moved]", verb: str, *, as_json: bool, debug: bool) -> None:
    """Carry out one move and show it. Exits with 2 on a failure, 130 when interrupted."""
    from rich.console import Console

    from hostweights.actors.warming import PlainBudget
    from hostweights.commands.warm import cancelled_by_signals

    budget = PlainBudget()
    with refusing(debug=debug), cancelled_by_signals(budget.cancel), Work(Console(stderr=True)) as work:
        moved = move(budget, lambda done, total: work.show(verb, done, total))
    if as_json:
        print_json(moved)
        return
    from hostweights.messages.failure import visible

    how = "already there" if moved.already else verb
    line = f"{moved.name}: {how}, {moved.size_bytes / 2**20:.1f} MiB, {moved.seconds:.1f} s"
    Console().print(visible(line), highlight=False, markup=False)
    Console().print(visible(f"  {moved.directory}"), highlight=False, markup=False, soft_wrap=True)
