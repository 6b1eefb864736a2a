"""``hostweights replay``: run the actors again from a journal and show the first thing that they do differently."""

from pathlib import Path
from typing import Annotated

import typer

from hostweights.commands.refusals import AsJson, Debug, print_json, refusing


def replay(
    file: Annotated[Path, typer.Argument(help="A journal; the parts of a rotated one are found beside it.")],
    actor: Annotated[
        str | None, typer.Option(help="store, resolver, publisher or transport (default: all that it records).")
    ] = None,
    diff: Annotated[bool, typer.Option("--diff", help="Show what led to a difference and what changed.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Run the actors again from a journal, on recorded inputs, and compare what they do with what they did.

    Nothing is loaded, published or sent. Exit code 0 when everything was the same; 1 when an actor did something else;
    2 when the file is no journal or does not record the actor.

    Example: hostweights replay worker.journal --actor store --diff
    """
    from hostweights.actors.kernel.replay import replay as replay_actor
    from hostweights.actors.kernel.replay_diff import actors_of, explained
    from hostweights.actors.replaying import replayable
    from hostweights.messages import AnyMessage
    from hostweights.messages.failure import Code, Stage, error

    with refusing(debug=debug):
        names = (actor,) if actor is not None else actors_of(file)
        if not names:
            text = (
                f"journal {file} records no actor from its start: it is empty, was cut before its first batch was "
                "whole, or has let its oldest records go; keep more parts or records of the next one"
            )
            raise error(Stage.RUNTIME, Code.JOURNAL_CORRUPT, text)
        results = [replay_actor(file, name, replayable(name), AnyMessage) for name in names]
    if as_json:
        print_json(results)
    else:
        for result in results:
            same = result.difference is None
            torn = f", {result.torn_bytes} bytes torn" if result.torn_bytes else ""
            facts = f"{result.num_handlers} handlers, {result.num_records} records{torn}"
            typer.echo(f"{result.actor:10} {'same' if same else 'DIFFERENT'}: {facts}")
            if diff and not same:
                typer.echo(explained(file, result))
    if any(result.difference is not None for result in results):
        raise typer.Exit(1)
