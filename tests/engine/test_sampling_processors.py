"""Logits processors: what each does to a batch, how they follow its rows, where others than the built-in come from."""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from inferd.engine.core.output import NewRequest
from inferd.engine.errors import ConfigError, InvalidRequest
from inferd.engine.frontend.llm import LLM
from inferd.engine.params import SamplingParams
from inferd.engine.sampling.chain import LogitsEdits, ProcessorChain
from inferd.engine.sampling.plugins import GROUP, find_processors, params_checks
from inferd.engine.sampling.processors import AddedRow, FunctionProcessor, ProcessorContext, RowProcessor, StepRows
from inferd.engine.sampling.sampler import NO_TOKEN, Sampler
from inferd.engine.testing.argmax_invariance import check_argmax_invariance
from inferd.engine.testing.model_folder import make_model_folder
from inferd.engine.worker.rows import InputBatch

VOCAB = 50
EOS = 3
CPU = torch.device("cpu")
CONTEXT = ProcessorContext(VOCAB, 8, (EOS,), CPU)


class Rows:
    """A persistent batch and what each of its requests knows."""

    def __init__(self, *factories: Any) -> None:
        self.batch = InputBatch(8, 100, (4,), ProcessorChain(CONTEXT, factories))

    def add(
        self, name: str, params: SamplingParams, prompt: tuple[int, ...] = (1, 2), output: tuple[int, ...] = ()
    ) -> None:
        self.batch.add(NewRequest(name, [*prompt, *output], len(prompt), params, 0, ([],), 0))

    def append(self, name: str, token_id: int) -> None:
        self.batch.append_tokens(np.array([self.batch.row(name)]), np.array([token_id]))

    def edits(self, *names: str) -> LogitsEdits:
        rows = np.array([self.batch.row(name) for name in names], np.intp)
        edits = self.batch.sampling_batch(rows, CPU).edits
        assert edits is not None
        return edits

    def logits(self, *names: str, logits: Tensor | None = None) -> Tensor:
        """What zeros, or `logits`, become before temperature."""
        return self.edits(*names).before_temperature(torch.zeros(len(names), VOCAB) if logits is None else logits)


def rows_of(params: SamplingParams, *factories: Any, **known: Any) -> Rows:
    rows = Rows(*factories)
    rows.add("a", params, **known)
    rows.batch.condense()
    return rows


def banned(logits: Tensor) -> list[int]:
    return (logits == -math.inf).nonzero()[:, 0].tolist()


def test_min_tokens_bans_every_way_to_stop() -> None:
    rows = rows_of(SamplingParams(min_tokens=2, stop_token_ids=[9, 30]))
    rows.add("free", SamplingParams(stop_token_ids=[9]))
    rows.batch.condense()
    for expected in ([EOS, 9, 30], [EOS, 9, 30], []):
        a, free = rows.logits("a", "free")
        assert banned(a) == expected
        assert banned(free) == []
        rows.append("a", 40)


def test_a_bad_word_loses_its_last_token_behind_the_others() -> None:
    rows = rows_of(SamplingParams(bad_words_token_ids=[[7], [10, 11, 12], [11, 13]]), prompt=(10, 11))
    assert banned(rows.logits("a")[0]) == [7]  # the prompt begins no word
    rows.append("a", 10)
    assert banned(rows.logits("a")[0]) == [7]
    rows.append("a", 11)
    assert banned(rows.logits("a")[0]) == [7, 12, 13]
    rows.append("a", 40)
    assert banned(rows.logits("a")[0]) == [7]


def test_bias_and_allowed_tokens() -> None:
    rows = rows_of(SamplingParams(allowed_token_ids=[5, 6, 7, 7], logit_bias={6: 2.5, 7: -1.0, 8: 100.0}))
    (logits,) = rows.logits("a")
    assert banned(logits) == sorted(set(range(VOCAB)) - {5, 6, 7})
    assert logits[5:8].tolist() == [0.0, 2.5, -1.0]


def test_penalties() -> None:
    """Repetition sees the prompt; presence and frequency only what was generated."""
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    rows = rows_of(params, prompt=(1, 2), output=(2, 4, 4))
    (logits,) = rows.logits("a", logits=torch.full((1, VOCAB), 3.0).index_fill_(1, torch.tensor([4]), -3.0))
    assert logits[[0, 1, 2, 4]].tolist() == [3.0, 1.5, 1.5 - 0.75, -6.0 - 1.0]
    rows.append("a", 2)
    (logits,) = rows.logits("a", logits=torch.full((1, VOCAB), 3.0))
    assert logits[[1, 2, 4]].tolist() == [1.5, 1.5 - 1.0, 1.5 - 1.0]
    only_output = rows_of(SamplingParams(frequency_penalty=1.0), prompt=tuple(range(20)), output=(25,))
    assert only_output.logits("a")[0].nonzero()[:, 0].tolist() == [25]


def test_many_different_tokens_are_all_penalised() -> None:
    params = SamplingParams(frequency_penalty=1.0)
    batch = InputBatch(1, 2000, (4,), ProcessorChain(ProcessorContext(1000, 1, (), CPU)))
    batch.add(NewRequest("a", [0, *range(700), *range(100)], 1, params, 0, ([],), 0))
    batch.condense()
    edits = batch.sampling_batch(np.array([0]), CPU).edits
    assert edits is not None
    (logits,) = edits.before_temperature(torch.zeros(1, 1000))
    assert logits.tolist() == [-2.0] * 100 + [-1.0] * 600 + [0.0] * 300


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_whose_tokens_are_all_forbidden(temperature: float) -> None:
    rows = rows_of(SamplingParams(allowed_token_ids=[EOS], min_tokens=5, temperature=temperature))
    rows.add("fine", SamplingParams(temperature=temperature))
    rows.batch.condense()
    batch = rows.batch.sampling_batch(np.array([0, 1]), CPU)
    tokens = Sampler()(torch.eye(VOCAB)[:2] * 90, batch).tolist()
    assert tokens == [NO_TOKEN, 1]


WISHES: list[dict[str, Any]] = [
    {},
    {},
    dict(repetition_penalty=1.5),
    dict(presence_penalty=1.0, frequency_penalty=-0.5),
    dict(logit_bias={4: 1.0, 9: -2.0}),
    dict(allowed_token_ids=[4, 5, 6, 9]),
    dict(bad_words_token_ids=[[4], [5, 6]], min_tokens=3),
    dict(min_tokens=4, stop_token_ids=[9], repetition_penalty=0.5),
]


@pytest.mark.parametrize("seed", range(4))
def test_fuzz_of_batch_changes(seed: int) -> None:
    """Rows come, go and move; the logits of each are those in a batch of its own, made for this step."""
    rng = random.Random(seed)
    rows, known = Rows(), {}
    for step in range(60):
        for name in rng.sample(sorted(known), rng.randint(0, len(known)) // 2):
            rows.batch.remove(name)
            del known[name]
        for index in range(rng.randint(0, 8 - len(known))):
            prompt = tuple(rng.choices(range(VOCAB), k=rng.randint(1, 6)))
            name = f"{step}-{index}"
            known[name] = (SamplingParams(**rng.choice(WISHES)), prompt, rng.choices(range(10), k=rng.randint(0, 4)))
            rows.add(name, known[name][0], prompt, tuple(known[name][2]))
        rows.batch.condense()
        names = rng.sample(sorted(known), rng.randint(0, len(known)))
        if not names:
            continue
        logits = torch.randn(len(names), VOCAB, generator=torch.Generator().manual_seed(step))
        together = rows.logits(*names, logits=logits.clone())
        for index, name in enumerate(names):
            params, prompt, output = known[name]
            alone = rows_of(params, prompt=prompt, output=tuple(output))
            assert together[index].tolist() == alone.logits("a", logits=logits[index : index + 1].clone())[0].tolist()
            known[name][2].append(rng.randrange(10))
            rows.append(name, known[name][2][-1])


class Doubled(RowProcessor[bool]):
    """Argmax-invariant: logits above 0 grow."""

    def __init__(self, context: ProcessorContext) -> None:
        super().__init__()

    def is_argmax_invariant(self) -> bool:
        return True

    def make_state(self, added: AddedRow) -> bool | None:
        return True if (added.params.extra_args or {}).get("double") else None

    def apply(self, logits: Tensor, step: StepRows) -> Tensor:
        for index, _ in self.states_of(step):
            logits[index] = torch.where(logits[index] > 0, logits[index] * 2, logits[index])
        return logits

    @staticmethod
    def validate_params(params: SamplingParams) -> None:
        if not isinstance((params.extra_args or {}).get("double", False), bool):
            raise InvalidRequest("double is true or false", param="extra_args")


class Liar(Doubled):
    """Forbids a token once it was generated."""

    def apply(self, logits: Tensor, step: StepRows) -> Tensor:
        for index, _ in self.states_of(step):
            logits[index, torch.from_numpy(step.output_token_ids(index).astype(np.int64))] -= 5.0
        return logits


class Silencer(Doubled):
    def apply(self, logits: Tensor, step: StepRows) -> Tensor:
        return torch.full_like(logits, -math.inf)


def test_false_claims_are_caught() -> None:
    asking, silent = SamplingParams(extra_args={"double": True}), SamplingParams()
    check_argmax_invariance(Doubled, [asking, silent])
    for liar in (Liar, Silencer):
        with pytest.raises(AssertionError, match="claims to be argmax-invariant, but in round"):
            check_argmax_invariance(liar, [silent, asking])
        check_argmax_invariance(liar, [silent])  # there it is never active


def test_argmax_invariant_ones_come_after_temperature_and_not_to_greedy_rows() -> None:
    seen: list[Tensor] = []

    class Watching(Doubled):
        def apply(self, logits: Tensor, step: StepRows) -> Tensor:
            seen.append(logits.clone())
            return logits

    rows = Rows(Watching)
    asking = {"extra_args": {"double": True}}
    rows.add("greedy", SamplingParams(temperature=0.0, **asking))
    rows.add("warm", SamplingParams(temperature=0.5, **asking))
    rows.batch.condense()
    greedy_alone = rows.batch.sampling_batch(np.array([0]), CPU)
    assert greedy_alone.takes_the_greatest
    logits = torch.randn(2, VOCAB)
    Sampler()(logits.clone(), rows.batch.sampling_batch(np.array([0, 1]), CPU))
    assert [part.tolist() for part in seen] == [[(logits[1] / 0.5).tolist()]]


def test_functions_of_one_request() -> None:
    def only_after_two(params: SamplingParams) -> Any:
        token_id = (params.extra_args or {}).get("favour")
        if token_id is None:
            return None
        return lambda output, logits: logits + torch.eye(VOCAB)[token_id] * len(output)

    rows = rows_of(SamplingParams(extra_args={"favour": 8}), lambda _: FunctionProcessor(only_after_two), output=(5, 5))
    rows.add("other", SamplingParams())
    rows.batch.condense()
    favoured, other = rows.logits("a", "other")
    assert favoured.nonzero().tolist() == [[8]]
    assert favoured[8] == 2.0
    assert not other.any()


PLUGIN = '''
import torch
from inferd.engine.errors import InvalidRequest
from inferd.engine.sampling.processors import RowProcessor


class OnlyToken(RowProcessor):
    """Forces one token."""

    def __init__(self, context):
        super().__init__()

    def is_argmax_invariant(self):
        return False

    def make_state(self, added):
        return (added.params.extra_args or {}).get("only_token")

    def apply(self, logits, step):
        for index, token_id in self.states_of(step):
            logits[index] = -torch.inf
            logits[index, token_id] = 0.0
        return logits

    @staticmethod
    def validate_params(params):
        if not isinstance((params.extra_args or {}).get("only_token", 0), int):
            raise InvalidRequest("only_token is a token id", param="extra_args")
'''


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a distribution with an entry point on the path."""

    def make(target: str, source: str = "") -> None:
        site = tmp_path / "site"
        info = site / "dummy_processors-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dummy-processors\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{GROUP}]\nonly_token = {target}\n")
        (site / "dummy_processors.py").write_text(source)
        monkeypatch.syspath_prepend(str(site))

    yield make
    sys.modules.pop("dummy_processors", None)


def test_an_installed_processor_serves_requests(install: Any, tmp_path: Path) -> None:
    install("dummy_processors:OnlyToken", PLUGIN)
    folder = make_model_folder(tmp_path / "model")
    args: dict[str, Any] = dict(load_format="dummy", dtype="float32", device="cpu", num_threads=1)
    with LLM(folder, in_process=True, **args) as llm:
        forced = SamplingParams(extra_args={"only_token": 65}, max_tokens=3, temperature=1.0)
        free = SamplingParams(max_tokens=3, temperature=0.0)
        mine, other = llm.generate(["hi", "hi"], [forced, free], progress=False)
        assert mine.outputs[0].token_ids == [65] * 3
        assert other.outputs[0].token_ids != [65] * 3
        with pytest.raises(InvalidRequest, match="only_token is a token id"):
            llm.generate("hi", SamplingParams(extra_args={"only_token": "no"}), progress=False)


def test_only_installed_ones_are_found(install: Any) -> None:
    assert find_processors() == []
    install("dummy_processors:OnlyToken", PLUGIN)
    (factory,) = find_processors()
    (check,) = params_checks([factory])
    check(SamplingParams())
    with pytest.raises(InvalidRequest):
        check(SamplingParams(extra_args={"only_token": None}))


@pytest.mark.parametrize(
    ("target", "source", "message"),
    [
        ("dummy_processors:Missing", "", "cannot be loaded: AttributeError"),
        ("dummy_processors:broken", "1 / 0", "cannot be loaded: ZeroDivisionError"),
        ("dummy_processors:Half", "class Half:\n    def apply(self): ...\n", "lacks is_argmax_invariant, update_state"),
        ("dummy_processors:nothing", "nothing = 3", "lacks is_argmax_invariant"),
    ],
)
def test_a_broken_one_keeps_the_engine_from_starting(install: Any, target: str, source: str, message: str) -> None:
    install(target, source)
    with pytest.raises(ConfigError, match=rf"{target}.*{message}"):
        find_processors()
