"""The README's tables of streaming on GPUs, from the result files of the GPU suites."""

from collections.abc import Callable, Sequence

from benchmarks.results_read import Row, read

FILES = ("stream-gpu-h200", "packed-h200", "fp8-h200", "allgather-h200-x2")
TOKENS = (1024, 4096, 16384)
OURS = "hostweights"


def gpu_figures() -> str:
    """A forward's seconds, ours and the best peer's, and what packing does to the host."""
    rows = {each.name: each.rows for each in read()}
    streamed, packed, fp8, gathered = (rows[f"{name}.json"] for name in FILES)
    by_method = {str(row["method"]): row for row in streamed}
    peers = [row for name, row in by_method.items() if name.startswith(("diffusers", "accelerate"))]
    ours = by_method[OURS]

    def streamed_s(method: str) -> Callable[[int], float]:
        return lambda tokens: _number(by_method[method], f"s_{tokens}")

    def limit_s(tokens: int) -> float:
        return streamed_s(OURS)(tokens) / _number(ours, f"floor_{tokens}")

    table: list[tuple[str, Callable[[int], float]]] = [
        ("resident", streamed_s("resident")),
        ("limit: the larger of resident and bytes / pinned link", limit_s),
        ("hostweights, two slots", streamed_s(OURS)),
        ("best of the peers", lambda tokens: min(_number(row, f"s_{tokens}") for row in peers)),
        ("hostweights, packed", lambda tokens: _found(packed, "packed", tokens, "s")),
        ("hostweights, FP8", lambda tokens: _found(fp8, "streamed", tokens, "seconds")),
        ("hostweights, AllGather over two H200", lambda tokens: _found(gathered, "allgather", tokens, "seconds")),
        ("the same, packed", lambda tokens: _found(gathered, "packed allgather", tokens, "seconds")),
    ]
    head = " | ".join(f"{tokens} tokens" for tokens in TOKENS)
    lines = [f"| a forward of 24 blocks of 403 MB bf16, one H200 | {head} |", "|---|" + "---|" * len(TOKENS)]
    for name, seconds in table:
        lines.append(f"| {name} | " + " | ".join(_seconds(seconds(tokens)) for tokens in TOKENS) + " |")
    lines += ["", *_host_table(packed), "", "Files: " + ", ".join(f"`{name}.json`" for name in FILES) + "."]
    return "\n".join(lines) + "\n"


def _host_table(packed: Sequence[Row]) -> list[str]:
    lines = ["| the same blocks on the host | on disk | PSS of the mapping | published in |", "|---|---|---|---|"]
    for row in packed:
        if row["step"] == "host":
            disk, pss = _number(row, "disk_bytes") / 1e9, _number(row, "mapped_pss") / 1e9
            lines.append(f"| {row['method']} | {disk:.2f} GB | {pss:.2f} GB | {_number(row, 'publication_s'):.1f} s |")
    return lines


def _found(rows: Sequence[Row], method: str, tokens: int, key: str) -> float:
    """Infinite where it was not measured."""
    found = [row for row in rows if row.get("method") == method and row.get("tokens") == tokens and key in row]
    return _number(found[0], key) if found else float("inf")


def _number(row: Row, key: str) -> float:
    value = row[key]
    assert isinstance(value, int | float), key
    return float(value)


def _seconds(value: float) -> str:
    return "" if value == float("inf") else f"{value:.3f} s"
