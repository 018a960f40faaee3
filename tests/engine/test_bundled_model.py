"""The default model in float32, served as it lies in the library, against transformers on the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from inferd.engine.bench.peers import load_transformers
from inferd.engine.frontend.llm import LLM
from inferd.engine.params import SamplingParams

NUM_TOKENS = 64
PROMPTS = [
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "The three laws of thermodynamics say that",
    "Zutaten: 200 g Mehl, 3 Eier, 1/2 l Milch.\n",
]


@pytest.fixture(scope="module")
def llm(bundled_model: Path) -> Iterator[LLM]:
    options: dict[str, Any] = dict(in_process=True, device="cpu", dtype="float32", max_model_len=512, num_threads=1)
    with LLM(bundled_model, **options) as llm:
        yield llm


def test_greedy_tokens_are_those_of_transformers(llm: LLM, bundled_model: Path) -> None:
    """transformers reads prompt and answer at once, without a cache. If at each place its best next token is the one
    that stands there, then it would have written the same."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    answers = [(output.prompt_token_ids, output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params)]
    model = load_transformers(bundled_model, torch.float32)
    for prompt, answer in answers:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer]), use_cache=False).logits[0]
        assert len(answer) == NUM_TOKENS
        assert answer == logits[len(prompt) - 1 : -1].argmax(dim=-1).tolist()


def test_a_seeded_text_is_the_same_alone_and_among_others(llm: LLM) -> None:
    """The second time with the prompts' blocks in the cache, which changes nothing either."""
    kinds: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"top_k": 30}, {"temperature": 0.6}, {"top_p": 0.5}]
    params = [SamplingParams(seed=seed, max_tokens=20, **kind) for seed, kind in enumerate(kinds)]
    together = [output.outputs[0].text for output in llm.generate(PROMPTS, params)]
    alone = [llm.generate(PROMPTS[index], params[index])[0].outputs[0].text for index in (1, 2)]
    assert alone == together[1:3]
    assert len(set(together)) == len(together)


def test_it_says_paris(llm: LLM) -> None:
    (output,) = llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=20))
    assert output.outputs[0].text == "The capital of France is Paris."
