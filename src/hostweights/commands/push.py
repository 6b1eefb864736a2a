"""``hostweights push``: put a stored artifact on a remote."""

from pathlib import Path
from typing import Annotated

import typer

from hostweights.commands.refusals import AsJson, Debug


def push(
    key: Annotated[str, typer.Argument(help="The artifact's key: 64 hexadecimal digits.")],
    url: Annotated[str, typer.Argument(help="A directory; any URL that fsspec can write.")],
    root: Annotated[Path, typer.Option(help="The store it lies in.", envvar="HOSTWEIGHTS_ROOT")],
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
    from hostweights.messages.config import Config, RemotePolicy

    config, remote = Config(root=str(root.absolute())), RemotePolicy(url=url)
    run_move(
        lambda budget, progress: push_artifact(config, key, remote, budget, progress, again=again),
        "pushed",
        as_json=as_json,
        debug=debug,
    )
