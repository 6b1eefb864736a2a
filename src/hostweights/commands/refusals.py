"""How a command says why it could not do what it was asked to."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hostweights.messages.failure import HostWeightsError


def say(failed: "HostWeightsError") -> None:
    """One line on stderr: what, where, why, the way out, and the stage and code for scripts."""
    from rich.console import Console

    text = f"error: {failed} [{failed.failure.stage}/{failed.code}]"
    Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)
