"""``python fuzz/run.py NAME [libFuzzer options]`` fuzzes one target, without a name all of them; see README.md."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import atheris

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src"), str(HERE.parent / "tests" / "helpers")]

from fuzz_kit import MAX_INPUT_BYTES  # noqa: E402  # found by the path above

LIMITS = (f"-max_len={MAX_INPUT_BYTES}", "-rss_limit_mb=2048", "-timeout=20", f"-dict={HERE / 'tokens.dict'}")


def fuzz(name: str, options: list[str]) -> None:
    """Run libFuzzer on a target, from its seeds and what earlier runs found; never returns."""
    with atheris.instrument_imports(include=["hostweights"]):
        from fuzz_targets import TARGETS

    target = TARGETS[name]
    corpus = HERE / "corpus" / name
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds()):
        (corpus / f"seed-{number}").write_bytes(seed)
    atheris.Setup([sys.argv[0], *LIMITS, *options, str(corpus)], target.check)
    atheris.Fuzz()


def fuzz_all(options: list[str]) -> int:
    """Run every target for FUZZ_SECONDS, one after the other; the number of those that found something."""
    from fuzz_targets import TARGETS

    seconds = os.environ.get("FUZZ_SECONDS", "60")
    failed = []
    for name in TARGETS:
        command = [sys.executable, __file__, name, f"-max_total_time={seconds}", "-print_final_stats=1", *options]
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
    peak_mib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10
    sys.stdout.write(f"{len(TARGETS)} targets, {peak_mib} MiB at most, findings: {', '.join(failed) or 'none'}\n")
    return len(failed)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments and not arguments[0].startswith("-"):
        fuzz(arguments[0], arguments[1:])
    sys.exit(fuzz_all(arguments))
