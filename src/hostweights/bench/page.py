"""The report: one page that needs nothing but itself."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

from hostweights.bench.results import Amount, Limit, Measurement, Streamed

_LANES: Final = ("copy", "stall", "compute")
_WIDTH, _LEFT, _LANE, _BAR = 1100, 80, 34, 24
_SHOWN_SPANS: Final = 6000
"""More than that make a page that nobody can look at; the first ones are drawn, and the page says so."""

_STYLE: Final = """
:root { color-scheme: light dark; --ink: #1d2330; --soft: #5b6472; --line: #d7dce3; --page: #fff;
  --copy: #2f74c0; --stall: #d1495b; --compute: #2a9d6f; --bar: #7a6fb0; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --soft: #a2abb8; --line: #39414d; --page: #14171c;
  --copy: #5fa0e6; --stall: #f0707f; --compute: #4cc294; --bar: #a79be0; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 1140px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p, figcaption { color: var(--soft); } figure { margin: 0; overflow-x: auto; }
dl { display: flex; flex-wrap: wrap; gap: .75rem 2.5rem; margin: 1rem 0; } dt { color: var(--soft); font-size: .85rem; }
dd { margin: 0; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; } td, th { padding: .15rem .9rem .15rem 0; }
th { text-align: left; color: var(--soft); font-weight: 600; border-bottom: 1px solid var(--line); }
td + td, th + th { text-align: right; } svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
svg .soft { fill: var(--soft); } svg line { stroke: var(--line); }
.copy { fill: var(--copy); } .stall { fill: var(--stall); } .compute { fill: var(--compute); }
.bar { fill: var(--bar); }
.bad { color: var(--stall); font-weight: 600; }
"""


def page(found: Measurement) -> str:
    """The whole document."""
    body = [
        f"<h1>{escape(found.model)}</h1>",
        f"<p>{escape(found.machine)} · {escape(found.versions)}</p>",
        _facts(found),
    ]
    if found.streamed is not None:
        body += _forward(found.streamed)
    if found.note:
        body.append(f"<p>{escape(found.note)}</p>")
    body += ["<h2>Memory</h2>", _memory(found.memory)]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>hostweights bench: {escape(found.model)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def size(size_bytes: float) -> str:
    """MiB, for people."""
    return f"{size_bytes / (1 << 20):,.1f} MiB"


def milliseconds(seconds: float) -> str:
    """A time, for people."""
    return f"{seconds * 1e3:,.2f} ms"


def _facts(found: Measurement) -> str:
    rate = f" ({found.artifact_bytes / found.publish_s / 1e9:.2f} GB/s)" if found.built and found.publish_s else ""
    facts = [
        ("artifact", size(found.artifact_bytes)),
        ("published" if found.built else "found in the store", f"{found.publish_s:.3f} s{rate}"),
        ("warm restore", f"{found.restore_s:.3f} s"),
    ]
    if found.resident_forward_s is not None:
        facts.append((f"resident forward, {found.resident_device}", milliseconds(found.resident_forward_s)))
    if found.streamed is not None:
        if found.streamed.registered_s is not None:
            facts.append(("pages registered", f"{found.streamed.registered_s:.3f} s"))
        facts.append((f"streamed forward, {found.streamed.device}", milliseconds(found.streamed.forward_s)))
    return "<dl>" + "".join(f"<div><dt>{escape(n)}</dt><dd>{escape(v)}</dd></div>" for n, v in facts) + "</dl>"


def _forward(streamed: Streamed) -> list[str]:
    equal = {
        True: "The output equals the resident model's, bit by bit.",
        False: '<span class="bad">The output DIFFERS from the resident model\'s.</span>',
        None: "",
    }[streamed.equal]
    cut = len(streamed.spans) - _SHOWN_SPANS
    more = f" The first {_SHOWN_SPANS} intervals are drawn." if cut > 0 else ""
    return [
        f"<p>{streamed.forwards} forwards through {streamed.slots} slots; {size(streamed.copied_bytes)} copied, "
        f"{streamed.stalls} stalls, {milliseconds(streamed.stall_s)} in all. {equal}</p>",
        f"<h2>Timeline</h2><figure>{_timeline(streamed)}<figcaption>Hover over an interval for its block and time."
        f"{more}</figcaption></figure>",
        "<h2>One forward beside its limits</h2>",
        _bars(
            [
                (limit.name, limit.seconds, milliseconds(limit.seconds))
                for limit in (Limit(name="measured", seconds=streamed.forward_s), *streamed.limits)
            ]
        ),
        _verdict(streamed),
        "<h2>Stalls by block</h2>",
        _stalls(streamed),
    ]


def _verdict(streamed: Streamed) -> str:
    """What bounds it. Copies overlap compute, so the larger of the two is the least that a forward can take."""
    compute, copies = streamed.limits[0], streamed.limits[1]
    bound = max(compute, copies, key=lambda each: each.seconds)
    if not streamed.forward_s or not bound.seconds:
        return ""
    share = bound.seconds / streamed.forward_s
    return f"<p>Bound by {escape(bound.name)}, which is {share:.0%} of the measured forward.</p>"


def _timeline(streamed: Streamed) -> str:
    spans = streamed.spans[:_SHOWN_SPANS]
    end_s = max((span.end_s for span in spans), default=0.0) or 1.0
    scale = (_WIDTH - _LEFT) / end_s
    height = _LANE * len(_LANES) + 24
    parts = [f'<svg viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" role="img" aria-label="timeline">']
    for lane, kind in enumerate(_LANES):
        parts.append(f'<text x="0" y="{lane * _LANE + 18}">{kind}</text>')
    for span in spans:
        left, wide = _LEFT + span.begin_s * scale, max(0.5, (span.end_s - span.begin_s) * scale)
        title = f"{streamed.blocks[span.block].path}: {span.kind} {milliseconds(span.end_s - span.begin_s)}"
        top = _LANES.index(span.kind) * _LANE
        parts.append(
            f'<rect class="{span.kind}" x="{left:.2f}" y="{top}" width="{wide:.2f}" height="{_BAR}" '
            f'opacity="{1 if span.block % 2 else 0.7}"><title>{escape(title)}</title></rect>'
        )
    for tick in range(6):
        left = _LEFT + tick * (_WIDTH - _LEFT) / 5
        anchor = "end" if tick == 5 else "middle" if tick else "start"
        parts.append(f'<line x1="{left}" x2="{left}" y1="0" y2="{height - 20}"/>')
        label = milliseconds(tick * end_s / 5)
        parts.append(f'<text class="soft" x="{left}" y="{height - 6}" text-anchor="{anchor}">{label}</text>')
    return "".join([*parts, "</svg>"])


def _stalls(streamed: Streamed) -> str:
    rows = [
        (
            escape(row.path),
            str(row.uses),
            str(row.copies),
            milliseconds(row.copy_s),
            milliseconds(row.compute_s),
            milliseconds(row.stall_s),
        )
        for row in streamed.blocks
    ]
    return _table(("block", "uses", "copies", "copying", "computing", "stalled"), rows)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{each}</th>" for each in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<figure><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></figure>"


def _memory(memory: Sequence[Amount]) -> str:
    return _bars([(each.name, float(each.size_bytes), size(each.size_bytes)) for each in memory])


def _bars(rows: Sequence[tuple[str, float, str]]) -> str:
    """Bars on one scale: name, value, text."""
    most = max((value for _, value, _ in rows), default=0.0) or 1.0
    left, room = 260, _WIDTH - 260 - 120
    parts = [f'<svg viewBox="0 0 {_WIDTH} {len(rows) * _LANE}" width="{_WIDTH}" role="img" aria-label="bars">']
    for number, (name, value, text) in enumerate(rows):
        top, wide = number * _LANE, max(1.0, value / most * room)
        parts.append(f'<text x="0" y="{top + 17}">{escape(name)}</text>')
        parts.append(f'<rect class="bar" x="{left}" y="{top}" width="{wide:.1f}" height="{_BAR}"/>')
        parts.append(f'<text x="{left + wide + 8:.1f}" y="{top + 17}">{escape(text)}</text>')
    return "<figure>" + "".join([*parts, "</svg>"]) + "</figure>"
