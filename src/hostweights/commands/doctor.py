"""``hostweights doctor``: whether this machine can do what is wanted of it, and what to mend."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hostweights.commands.layered import layered_config_of_user
from hostweights.commands.refusals import AsJson, Debug, print_json, refusing, root_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from hostweights.actors.doctor import Verdict


def doctor(
    root: Annotated[
        Path | None,
        typer.Option(
            help="The store, there or not (default: the setting root, else ~/.cache/hostweights).",
            envvar="HOSTWEIGHTS_ROOT",
            parser=root_path,
        ),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Look at this machine and give a verdict per feature, with the mend.

    Locks, registration and the link to each GPU are tried on small files beside the root, which are removed; the root
    is not made. Exit code 0 when nothing fails, 1 when a feature does not work (warnings are no failure), 2 when the
    settings are ones that no load takes.

    Example: hostweights doctor --root /var/cache/hostweights
    """
    from rich.console import Console

    from hostweights.actors.doctor import State, judge, read_machine

    with refusing(debug=debug):
        readings = read_machine(Path(layered_config_of_user(root).root).absolute())
    verdicts = judge(readings)
    if as_json:
        print_json({"verdicts": verdicts, "readings": readings})
    else:
        Console(emoji=False).print(view(verdicts))
    if any(verdict.state is State.FAILURE for verdict in verdicts):
        raise typer.Exit(1)


def view(verdicts: "Sequence[Verdict]") -> "RenderableType":
    """The verdicts, each with its mend below what was found."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    styles = {"ok": "green", "warning": "yellow", "failure": "bold red", "absent": "dim"}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("feature", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("found", overflow="fold")
    for verdict in verdicts:
        found = Text(verdict.found)
        if verdict.mend:
            found.append(f"\n-> {verdict.mend}", style="bold" if verdict.state in ("warning", "failure") else "dim")
        table.add_row(Text(verdict.feature), Text(verdict.state, style=styles[verdict.state]), found)
    return table
