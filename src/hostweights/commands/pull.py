"""``hostweights pull``: bring an artifact from a remote into the store."""

from pathlib import Path
from typing import Annotated

import typer

from hostweights.commands.refusals import AsJson, Debug


def pull(
    key: Annotated[str, typer.Argument(help="The artifact's key: 64 hexadecimal digits.")],
    url: Annotated[str, typer.Argument(help="Where it was pushed to; any URL that fsspec can open.")],
    root: Annotated[Path, typer.Option(help="The store to bring it into.", envvar="HOSTWEIGHTS_ROOT")],
    timeout_s: Annotated[float, typer.Option(min=0.001, help="Seconds that one request may take.")] = 30.0,
    attempts: Annotated[int, typer.Option(min=1, max=100, help="How often a request is made.")] = 5,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Bring an artifact from a remote, comparing every byte with its digest.

    An interrupted pull goes on where it stopped. Exit code 0 when the artifact is ready, 2 on bad input or a failure,
    130 when interrupted.

    Example: hostweights pull $KEY file:///var/cache/hostweights-remote --root /var/cache/hostweights-other
    """
    from hostweights.actors.remote import pull as pull_artifact
    from hostweights.commands.moving import run_move
    from hostweights.messages.config import Config, RemotePolicy

    config = Config(root=str(root.absolute()))
    remote = RemotePolicy(url=url, timeout_s=timeout_s, attempts=attempts)
    run_move(
        lambda budget, progress: pull_artifact(config, key, remote, budget, progress),
        "pulled",
        as_json=as_json,
        debug=debug,
    )
