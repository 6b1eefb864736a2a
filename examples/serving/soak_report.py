"""What a soak found, and how it is shown."""

import msgspec
from rich.table import Table

from examples.serving.growth import IN_BYTES, MIB, Growth, Point
from examples.serving.load import Report


class SoakReport(msgspec.Struct, kw_only=True):
    """All of it; ``steady`` and ``shaken`` are what the clients of the two servers saw."""

    seconds: float = 0.0
    warm_up_s: float = 0.0
    samples: int = 0
    actions: dict[str, int] = {}
    cycles: dict[str, int] = {}
    """Of both tenants: how many cycles, warm ones, publications, outputs compared, wrong outputs, failed loads."""
    troubles: dict[str, int] = {}
    """Failures that tenants and commands met, each typed and survived, by code."""
    broken: list[str] = []
    """What may not happen: a process that ended by itself, a command that failed without a typed reason."""
    steady: Report
    shaken: Report
    growths: list[Growth] = []
    series: dict[str, list[Point]] = {}

    @property
    def over(self) -> list[str]:
        """The series that grow by more than is allowed."""
        return [f"{each.subject}: {each.kind}" for each in self.growths if each.over]

    @property
    def ok(self) -> bool:
        """Whether it is as promised."""
        wrong = self.cycles.get("wrong", 0) + self.cycles.get("failed", 0)
        served = self.steady.ok and self.shaken.ok and self.cycles.get("compared", 0) > 0
        return served and not wrong and not self.broken and not self.over

    def met(self, code: str) -> None:
        """Count a typed failure."""
        self.troubles[code] = self.troubles.get(code, 0) + 1


def tables(report: SoakReport) -> list[Table]:
    """The report for people."""
    shown = Table("", "", title="Soak", title_justify="left", show_header=False)
    for name, cell in (
        ("time", f"{report.seconds:.0f} s, {report.samples} samples, the first {report.warm_up_s:.0f} s left out"),
        ("requests", f"{report.steady.requests} and {report.shaken.requests}"),
        ("wrong answers", f"{report.steady.wrong} and {report.shaken.wrong}"),
        ("failed requests", "; ".join([*report.steady.failed, *report.shaken.failed][:3]) or "0"),
        ("in flight on killed workers, closed at once", str(len(report.shaken.lost_with_killed_worker))),
        ("done meanwhile", ", ".join(f"{count} {name}" for name, count in sorted(report.actions.items()))),
        ("tenants", ", ".join(f"{count} {name}" for name, count in report.cycles.items())),
        ("typed failures met", ", ".join(f"{count} {name}" for name, count in report.troubles.items()) or "none"),
        ("broken", "; ".join(report.broken[:3]) or "nothing"),
        ("grows", ", ".join(report.over) or "nothing"),
        ("as promised", "yes" if report.ok else "NO"),
    ):
        shown.add_row(name, cell)
    slopes = Table("what", "", "points", "first", "last", "an hour adds", "95 % band", "allowed", "verdict")
    for each in report.growths:
        unit, end = (MIB, " MiB") if each.kind in IN_BYTES else (1, "")
        figures = (each.first, each.last, each.slope_per_h, each.low_per_h, each.high_per_h, each.allowed_per_h)
        first, last, slope, low, high, allowed = (f"{figure / unit:.2f}" for figure in figures)
        verdict = "GROWS" if each.over else "ok"
        slopes.add_row(
            each.subject, each.kind + end, str(each.points), first, last, slope, f"{low} to {high}", allowed, verdict
        )
    return [shown, slopes]
