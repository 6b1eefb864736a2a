"""``hostweights push``: put a stored artifact on a remote."""

from pathlib import Path
from typing import Annotated

import typer

from hostweights.commands.layered import layered_config
from hostweights.commands.refusals import AsJson, Debug, refusing, root_path


def push(
    key: Annotated[str, typer.Argument(help="The artifact's key: 64 hexadecimal digits.")],
    url: Annotated[
        str | None,
        typer.Argument(help="A directory; any URL that fsspec can write (default: the setting remote.url)."),
    ] = None,
    root: Annotated[
        Path | None,
        typer.Option(
            help="The store it lies in (default: the setting root).", envvar="HOSTWEIGHTS_ROOT", parser=root_path
        ),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Send it although it is there: it may be damaged.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Put a stored artifact on a remote, verified, whole or not at all.

    Exit code 0 when it is there, 2 on bad input or a failure, 130 when interrupted.

    Example: hostweights push $KEY file:///var/cache/hostweights-remote --root /var/cache/hostweights
    """
    from hostweights.actors.remote import push as push_artifact
    from hostweights.commands.moving import run_move

    with refusing(debug=debug):
        config = layered_config(root, remote__url=url)
    run_move(
        lambda budget, progress: push_artifact(config, key, config.remote, budget, progress, again=again),
        "pushed",
        as_json=as_json,
        debug=debug,
    )
