"""Shows the demo to a person: a progress line per worker and a final table."""

from typing import Self

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table

from hostweights.demo.protocol import DemoResult, Progress, WorkerResult

MIB = 1024 * 1024


class ProgressView:
    """A bar per worker; plain lines when the console is not a terminal."""

    def __init__(self, console: Console, workers: int) -> None:
        self._console = console
        self._bars = Bars(
            SpinnerColumn(),
            TextColumn("worker {task.fields[number]}"),
            BarColumn(bar_width=30),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._tasks: list[TaskID] = [
            self._bars.add_task("waiting", number=number + 1, total=None, start=False) for number in range(workers)
        ]
        self._stages = [""] * workers

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def show(self, number: int, progress: Progress) -> None:
        """Show what a worker does now."""
        task = self._tasks[number]
        self._bars.start_task(task)
        if progress.total_bytes:
            self._bars.update(
                task, description=progress.stage, total=progress.total_bytes, completed=progress.done_bytes
            )
        else:
            self._bars.update(task, description=progress.stage, total=None)
        if not self._console.is_terminal and self._stages[number] != progress.stage:
            self._console.print(f"worker {number + 1}: {progress.stage}")
        self._stages[number] = progress.stage


def render(result: DemoResult) -> RenderableType:
    """The final table and the verdict."""
    table = Table(title="One host copy of the weights", title_justify="left")
    table.add_column("")
    for number, worker in enumerate(result.workers):
        table.add_column(f"worker {number + 1}\n{worker.role} start", justify="right")
    stages = list(dict.fromkeys(name for worker in result.workers for name in worker.seconds))
    for stage in stages:
        table.add_row(f"{stage}, s", *(_seconds(worker, stage) for worker in result.workers))
    table.add_section()
    rows = (
        ("private before adoption, MiB", [_mib(each.private_bytes_before_adoption) for each in result.workers]),
        ("private after adoption, MiB", [_mib(each.private_bytes_after_adoption) for each in result.workers]),
        ("weights mapped (PSS), MiB", [_mib(each.mapped_pss_bytes) for each in result.workers]),
        ("anonymous in that mapping, MiB", [_mib(each.mapped_anonymous_bytes) for each in result.workers]),
        ("loop held at most, ms", [f"{max(each.loop_held_s.values()) * 1000:.1f}" for each in result.workers]),
        ("forwards", [str(each.forwards) for each in result.workers]),
        ("block copies / stalls", [f"{each.ring.copies} / {each.ring.stalls}" for each in result.workers]),
    )
    for name, cells in rows:
        table.add_row(name, *cells)
    return Group(table, *_verdict(result))


def _verdict(result: DemoResult) -> list[str]:
    pss_bytes = sum(worker.mapped_pss_bytes for worker in result.workers)
    return [
        f"artifact {_mib(result.artifact_bytes)} MiB; all workers together map {_mib(pss_bytes)} MiB "
        f"({pss_bytes / result.artifact_bytes:.3f} copies)",
        f"cosine cat/kitten {result.cosine.cat_kitten:.3f}, cat/stocks {result.cosine.cat_stocks:.3f}, "
        "from the streamed model",
        "streamed output equals the plain model to the bit: " + ("yes" if result.equal else "NO"),
        "leaked: " + (", ".join(result.leaks) or "nothing"),
    ]


def _seconds(worker: WorkerResult, stage: str) -> str:
    return f"{worker.seconds[stage]:.3f}" if stage in worker.seconds else "-"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / MIB:.1f}"
