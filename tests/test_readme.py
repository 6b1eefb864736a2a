"""The README says what is so."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_figures_come_from_the_result_files() -> None:
    sys.path.insert(0, str(ROOT))
    try:
        from benchmarks.readme import written
    finally:
        sys.path.remove(str(ROOT))

    assert written(README) == README, "run: python -m benchmarks.readme"


def test_python_snippets_compile() -> None:
    snippets = re.findall(r"```python\n(.*?)```", README, re.DOTALL)

    assert len(snippets) == 2
    for snippet in snippets:
        # The first snippet stands inside a coroutine.
        compile("async def main():\n" + "".join(f"    {line}\n" for line in snippet.splitlines()), "README.md", "exec")


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")

    for target in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
