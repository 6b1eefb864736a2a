"""``hostweights pull``: bring an artifact from a remote into the store."""

from pathlib import Path
from typing import Annotated

import typer

from hostweights.commands.layered import layered_config
from hostweights.commands.refusals import AsJson, Debug, refusing, root_path


def pull(
    key: Annotated[str, typer.Argument(help="The artifact's key: 64 hexadecimal digits.")],
    url: Annotated[
        str | None,
        typer.Argument(help="Where it was pushed to; any URL that fsspec can open (default: the setting remote.url)."),
    ] = None,
    root: Annotated[
        Path | None,
        typer.Option(
            help="The store to bring it into (default: the setting root).", envvar="HOSTWEIGHTS_ROOT", parser=root_path
        ),
    ] = None,
    timeout_s: Annotated[
        float | None, typer.Option(min=0.001, help="Seconds that one request may take [default: 30].")
    ] = None,
    attempts: Annotated[
        int | None, typer.Option(min=1, max=100, help="How often a request is made [default: 5].")
    ] = None,
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

    with refusing(debug=debug):
        config = layered_config(root, remote__url=url, remote__timeout_s=timeout_s, remote__attempts=attempts)
    run_move(
        lambda budget, progress: pull_artifact(config, key, config.remote, budget, progress),
        "pulled",
        as_json=as_json,
        debug=debug,
    )
