"""``hostweights config``: every setting, its value, and where that came from."""

from pathlib import Path
from typing import Annotated

import typer

from hostweights.commands.refusals import AsJson, Debug, print_json, refusing, say


def config(
    file: Annotated[
        Path | None, typer.Option("--file", help="A TOML file of settings (default: what HOSTWEIGHTS_CONFIG names).")
    ] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Set one setting; may be repeated.")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show each setting, its value and where that came from: default, file, environment or flag; the last one wins.

    Exit code 0 when the settings make a configuration; 1 when they do not (the rows are printed all the same, the
    reason on stderr); 2 when a name is unknown or a value does not fit.

    Example: hostweights config --set root=/var/cache/hostweights --json
    """
    from hostweights.messages.failure import HostWeightsError
    from hostweights.settings import read_settings

    with refusing(debug=debug):
        settings = read_settings(file=file, flags=_flags(assignments or []), flag="--set ")
    if as_json:
        print_json(settings.rows)
    else:
        width = max(len(row.name) for row in settings.rows)
        for row in settings.rows:
            where = f"{row.origin} ({row.place})" if row.place else row.origin
            typer.echo(f"{row.name:{width}}  {bytes(row.value).decode():24}  {where}")
    try:
        _ = settings.config
    except HostWeightsError as failed:
        if debug:
            raise
        say(failed)
        raise typer.Exit(1) from None


def _flags(assignments: list[str]) -> dict[str, object]:
    from hostweights.messages.failure import Code, Stage, error

    flags: dict[str, object] = {}
    for each in assignments:
        name, equals, value = each.partition("=")
        if not equals:
            text = f"--set {each} sets nothing; expected NAME=VALUE, as in --set wait.domain_s=5"
            raise error(Stage.CONFIGURATION, Code.INVALID_CONFIG, text)
        flags[name.strip()] = value.strip()
    return flags
