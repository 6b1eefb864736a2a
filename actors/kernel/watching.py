"""Who is told when an actor has ended."""

from typing import TYPE_CHECKING

from .contract import Terminated

if TYPE_CHECKING:
    from .intake import Intake


class Watches:
    """The watches of one system: by the actor that is watched, its watchers in the order in which they came."""

    def __init__(self) -> None:
        self._watchers: dict[Intake, dict[Intake, None]] = {}

    def add(self, watcher: "Intake", watched: "Intake") -> None:
        """Tell ``watcher`` when ``watched`` has ended for good."""
        self._watchers.setdefault(watched, {})[watcher] = None

    def forget(self, watcher: "Intake") -> None:
        """The incarnation that watched has ended."""
        for watched in tuple(self._watchers):
            self._watchers[watched].pop(watcher, None)
            if not self._watchers[watched]:
                del self._watchers[watched]

    def ended(self, watched: "Intake") -> None:
        """Tell everyone who watched, once."""
        for watcher in self._watchers.pop(watched, ()):
            if watcher.refusing is None:
                watcher.push(Terminated(actor=watched.name, incarnation=watched.incarnation), None)
