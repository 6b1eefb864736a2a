"""The pages on loading say what is so."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hostweights.hwr.records import ModelRecord

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"


def snippets(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("page", ["loading.md", "model-records.md"])
def test_B9_snippets_compile(page: str) -> None:
    assert snippets(page)
    for snippet in snippets(page):
        inside = "".join(f"    {line}\n" for line in snippet.splitlines())
        compile(f"async def main():\n{inside}", page, "exec")


def test_B7_record_of_the_page_can_be_built_and_its_validator_refuses() -> None:
    names: dict[str, Any] = {}
    for snippet in snippets("model-records.md"):
        exec(snippet, names)  # noqa: S102  # our own page
    record = names["RECORD"]
    assert isinstance(record, ModelRecord)
    assert record.for_rank(2, 1).tp_rank == 1
    module = nn.Module()
    module.final_layer = nn.Linear(2, 2, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"expected torch\.float32"):
        names["validate"](module)
