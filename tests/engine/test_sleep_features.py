"""What else lives in a worker's memory comes back with it: adapters, pooling models, draft models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from inferd.engine.config import SpeculativeArgs, SpeculativeMethod
from inferd.engine.frontend.llm import LLM
from inferd.engine.frontend.lora import LoRARequest
from inferd.engine.params import SamplingParams
from inferd.engine.testing.encoder_folder import make_encoder_folder
from inferd.engine.testing.random_adapter import make_random_adapter
from inferd.engine.testing.random_checkpoint import make_random_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = ["a prompt", "another", "the third", "and one more"]


@contextmanager
def serving(folder: Path, **options: Any) -> Iterator[LLM]:
    fixed: dict[str, Any] = dict(in_process=True, device="cpu", dtype="float32", kernels="torch")
    with LLM(folder, **(fixed | options)) as llm:
        yield llm


def sleep_and_wake(llm: LLM, level: int) -> None:
    before = llm.memory()
    llm.sleep(level)
    assert all(record.weights == record.kv == 0 for record in llm.memory())
    assert llm.wake().is_awake
    assert [(record.weights, record.kv) for record in llm.memory()] == [(rank.weights, rank.kv) for rank in before]


@pytest.mark.parametrize("options", [{}, {"tensor_parallel_size": 2}], ids=["one rank", "two ranks"])
def test_adapters(tmp_path: Path, options: dict[str, Any]) -> None:
    """Also one that is loaded while the engine sleeps."""
    folder = make_random_checkpoint(tmp_path / "model")
    names = ("first", "second")
    paths = [str(make_random_adapter(tmp_path / name, folder, seed=at)) for at, name in enumerate(names)]
    with serving(folder, enable_lora=True, max_loras=2, max_cpu_loras=3, **options) as llm:
        adapters = [None, *map(LoRARequest, names, paths), None]
        expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, lora_request=adapters)]
        assert len(set(map(tuple, expected))) == len(PROMPTS)
        for level in (1, 2):
            sleep_and_wake(llm, level)
            again = llm.generate(PROMPTS, GREEDY, lora_request=adapters)
            assert [output.outputs[0].token_ids for output in again] == expected
        llm.sleep(2)
        late = str(make_random_adapter(tmp_path / "late", folder, seed=1))
        llm.add_lora(LoRARequest("late", late))
        llm.wake()
        (output,) = llm.generate(PROMPTS[2], GREEDY, lora_request=LoRARequest("late"))
        assert (
            output.outputs[0].token_ids
            == llm.generate(PROMPTS[2], GREEDY, lora_request=adapters[2])[0].outputs[0].token_ids
        )


def test_a_model_that_pools(tmp_path: Path) -> None:
    with serving(make_encoder_folder(tmp_path / "model")) as llm:
        expected = [output.embedding for output in llm.embed(PROMPTS)]
        for level in (1, 2):
            sleep_and_wake(llm, level)
            assert [output.embedding for output in llm.embed(PROMPTS)] == expected


@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_drafts(tmp_path: Path, method: SpeculativeMethod) -> None:
    """A draft model gives its weights and pages back with the others, and forgets what it knew of old pages."""
    folder = make_random_checkpoint(tmp_path / "model")
    draft = str(make_random_checkpoint(tmp_path / "draft", seed=0, num_hidden_layers=1)) if method == "draft" else None
    speculative = SpeculativeArgs(method, num_speculative_tokens=3, prompt_lookup_min=1, model=draft)
    with serving(folder) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]
        plain_bytes = llm.memory()[0].weights
    with serving(folder, speculative=speculative) as llm:
        assert (llm.memory()[0].weights > plain_bytes) == (method == "draft")
        assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)] == expected
        for level in (1, 2):
            sleep_and_wake(llm, level)
            assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)] == expected
