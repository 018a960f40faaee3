"""Several answers to one prompt and log probabilities, from the engine's outputs to what a caller reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models

from inferd.engine.errors import InvalidRequest, RequestFailed
from inferd.engine.frontend.inputs import InputProcessor, PreparedRequest
from inferd.engine.frontend.llm import LLM
from inferd.engine.frontend.logprobs import LogprobReader, TokenBytes
from inferd.engine.frontend.outputs import RequestOutput, RequestOutputCollector
from inferd.engine.frontend.processor import OutputProcessor
from inferd.engine.frontend.tokenizer import Tokenizer
from inferd.engine.logprobs import PromptChunk, PromptLedger, TokenLogprobs, join
from inferd.engine.messages import EngineOutput, FinishReason
from inferd.engine.params import OutputKind, SamplingParams
from inferd.engine.testing.model_folder import IM_END_ID, make_model_folder

Prepare = Callable[..., PreparedRequest]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


@pytest.fixture
def prepare(tokenizer: Tokenizer) -> Prepare:
    def make(kind: OutputKind = OutputKind.FINAL_ONLY, **params: Any) -> PreparedRequest:
        inputs = InputProcessor(tokenizer, max_model_len=1000, vocab_size=272)
        return inputs.process("hi", SamplingParams(output_kind=kind, max_tokens=50, **params), request_id="mine")

    return make


@pytest.fixture
def processor(tokenizer: Tokenizer) -> OutputProcessor:
    return OutputProcessor(tokenizer)


def logprobs_of(token_ids: list[int], others: list[int] | None = None) -> TokenLogprobs:
    """-0.5 for each token, and -1, -2, … for `others` at every one of them."""
    rows = [[token_id, *(others or [])] for token_id in token_ids]
    values = [[-0.5, *(-1.0 - place for place in range(len(others or [])))] for _ in token_ids]
    arrays = np.array(rows, np.int32), np.array(values, np.float32), np.full(len(rows), 3, np.int32)
    return TokenLogprobs(1 + len(others or []), *(array.tobytes() for array in arrays))


def said(request: PreparedRequest, index: int, text: str, reason: FinishReason | None = None) -> EngineOutput:
    token_ids = list(text.encode()) + ([IM_END_ID] if reason is FinishReason.STOP else [])
    logprobs = logprobs_of(token_ids) if request.add.params.logprobs is not None else None
    return EngineOutput(request.split_choices()[index].request_id, token_ids, reason, logprobs=logprobs)


def texts(report: RequestOutput) -> dict[int, str]:
    return {choice.index: choice.text for choice in report.outputs}


# --- several answers ------------------------------------------------------------------------------------------------


def test_each_answer_is_a_request_with_a_seed_of_its_own(prepare: Prepare) -> None:
    request = prepare(n=3, seed=2**63 - 2, prompt_logprobs=1)
    adds = request.split_choices()
    assert [add.params.seed for add in adds] == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert [add.params.n for add in adds] == [1, 1, 1]
    assert [add.params.prompt_logprobs for add in adds] == [1, None, None]
    assert len({add.request_id for add in adds}) == 3
    assert {add.params.seed for add in prepare(n=3).split_choices()} == {None}
    assert None not in {add.params.seed for add in prepare(n=3, seed=-3).split_choices()}
    single = prepare()
    assert single.split_choices() == [single.add]


def test_all_answers_come_together_at_the_end(processor: OutputProcessor, prepare: Prepare) -> None:
    request = prepare(n=3)
    assert len(processor.add(request)) == 3
    assert processor.process([said(request, 2, "c"), said(request, 0, "a", FinishReason.STOP)]).reports == []
    assert processor.process([said(request, 2, "cc", FinishReason.LENGTH)]).reports == []
    assert processor.num_unfinished == 1
    (report,) = processor.process([said(request, 1, "b", FinishReason.LENGTH)]).reports
    assert [choice.text for choice in report.outputs] == ["a", "b", "ccc"]
    assert [choice.index for choice in report.outputs] == [0, 1, 2]
    assert report.outputs[0].finish_reason is FinishReason.STOP
    assert (report.finished, report.num_output_tokens) == (True, 6)
    assert processor.num_unfinished == 0


def test_cumulative_reports_hold_all_answers_so_far(processor: OutputProcessor, prepare: Prepare) -> None:
    request = prepare(OutputKind.CUMULATIVE, n=2)
    processor.add(request)
    parts = [said(request, 1, "b"), said(request, 0, "a", FinishReason.STOP), said(request, 1, "c", FinishReason.STOP)]
    reports = processor.process(parts).reports
    assert [texts(report) for report in reports] == [{1: "b"}, {0: "a", 1: "b"}, {0: "a", 1: "bc"}]
    assert [report.finished for report in reports] == [False, False, True]


async def test_deltas_of_several_answers_are_merged_by_index(processor: OutputProcessor, prepare: Prepare) -> None:
    request = prepare(OutputKind.DELTA, n=2, logprobs=0)
    collector = RequestOutputCollector(OutputKind.DELTA)
    processor.add(request, collector)
    processor.process([said(request, 1, "x"), said(request, 0, "a"), said(request, 1, "y", FinishReason.LENGTH)])
    merged = await collector.get()
    assert texts(merged) == {0: "a", 1: "xy"}
    assert [len(choice.logprobs or []) for choice in merged.outputs] == [1, 2]
    assert not merged.finished
    processor.process([said(request, 0, "b", FinishReason.LENGTH)])
    last = await collector.get()
    assert (texts(last), last.finished) == ({0: "b"}, True)


def test_an_abort_ends_the_answers_that_still_run(processor: OutputProcessor, prepare: Prepare) -> None:
    request = prepare(n=3)
    processor.add(request)
    processor.process([said(request, 1, "done", FinishReason.STOP), said(request, 0, "half")])
    ids = [add.request_id for add in request.split_choices()]
    processed = processor.abort(processor.internal_ids("mine"))
    assert processed.ids_to_abort == [ids[0], ids[2]]
    (report,) = processed.reports
    reasons = [choice.finish_reason for choice in report.outputs]
    assert reasons == [FinishReason.ABORT, FinishReason.STOP, FinishReason.ABORT]
    assert texts(report) == {0: "half", 1: "done", 2: ""}
    assert processor.num_unfinished == 0
    assert processor.process([said(request, 0, "late")]).reports == []


def test_a_stop_string_aborts_its_own_answer_alone(processor: OutputProcessor, prepare: Prepare) -> None:
    request = prepare(n=2, stop="END")
    processor.add(request)
    processed = processor.process([said(request, 1, "xEND")])
    assert processed.ids_to_abort == [request.split_choices()[1].request_id]
    assert processed.reports == []
    (report,) = processor.process([said(request, 0, "a", FinishReason.STOP), said(request, 1, "late")]).reports
    assert texts(report) == {0: "a", 1: "x"}


async def test_one_failed_answer_fails_the_request(processor: OutputProcessor, prepare: Prepare) -> None:
    request = prepare(n=3)
    collector = RequestOutputCollector(OutputKind.FINAL_ONLY)
    first, second, third = processor.add(request, collector)
    broken = EngineOutput(second.request_id, [], FinishReason.ERROR, error="no logits")
    processed = processor.process([said(request, 0, "a"), broken, said(request, 2, "late")])
    assert sorted(processed.ids_to_abort) == sorted([first.request_id, third.request_id])
    with pytest.raises(RequestFailed, match="no logits"):
        await collector.get()
    assert processor.num_unfinished == 0


def test_llm_gives_n_answers(folder: Path) -> None:
    args: dict[str, Any] = dict(load_format="dummy", dtype="float32", device="cpu", num_threads=1)
    with LLM(folder, in_process=True, **args) as llm:
        params = SamplingParams(n=3, seed=5, max_tokens=5, ignore_eos=True, logprobs=1, prompt_logprobs=0)
        (several,) = llm.generate("hello", params, progress=False)
        alone = [
            llm.generate("hello", SamplingParams(seed=seed, max_tokens=5, ignore_eos=True), progress=False)[0]
            for seed in (5, 6, 7)
        ]
    assert [choice.token_ids for choice in several.outputs] == [one.outputs[0].token_ids for one in alone]
    assert len({tuple(choice.token_ids) for choice in several.outputs}) == 3
    for choice in several.outputs:
        assert choice.logprobs is not None
        for token_id, alternatives in zip(choice.token_ids, choice.logprobs, strict=True):
            assert token_id in alternatives
            assert len(alternatives) in (1, 2)
            best = max(alternatives.values(), key=lambda logprob: logprob.logprob)
            assert best.rank == 1
    assert several.prompt_logprobs is not None
    assert several.prompt_logprobs[0] is None
    decoded = [next(iter((entry or {}).values())).decoded_token for entry in several.prompt_logprobs[1:]]
    assert decoded == list("ello")


# --- log probabilities ----------------------------------------------------------------------------------------------


def test_logprobs_follow_the_tokens(processor: OutputProcessor, prepare: Prepare) -> None:
    request = prepare(OutputKind.DELTA, logprobs=2)
    processor.add(request)
    output = EngineOutput(request.add.request_id, [97, 98], logprobs=logprobs_of([97, 98], [120, 97]))
    (report,) = processor.process([output]).reports
    first, second = report.outputs[0].logprobs or []
    assert list(first) == [97, 120]
    assert list(second) == [98, 120, 97]
    assert (first[97].logprob, first[97].rank, first[97].decoded_token) == (-0.5, 3, "a")
    assert [(token.logprob, token.rank, token.decoded_token) for token in second.values()][1:] == [
        (-1.0, 1, "x"),
        (-2.0, 2, "a"),
    ]


def test_logprobs_end_where_a_stop_string_ends_the_tokens(processor: OutputProcessor, prepare: Prepare) -> None:
    request = prepare(stop="END", logprobs=0)
    processor.add(request)
    (report,) = processor.process([said(request, 0, "one ENDless")]).reports
    (choice,) = report.outputs
    assert (choice.text, len(choice.token_ids), len(choice.logprobs or [])) == ("one ", 7, 7)


def test_prompt_logprobs_are_told_once_to_readers_of_deltas(processor: OutputProcessor, prepare: Prepare) -> None:
    for kind, expected in ((OutputKind.DELTA, [True, False]), (OutputKind.CUMULATIVE, [True, True])):
        request = prepare(kind, prompt_logprobs=0)
        processor.add(request)
        first = EngineOutput(request.add.request_id, [97], prompt_logprobs=logprobs_of([105]))
        reports = processor.process([first, said(request, 0, "b", FinishReason.STOP)]).reports
        assert [report.prompt_logprobs is not None for report in reports] == expected
        told = reports[0].prompt_logprobs
        assert told is not None
        assert (told[0], (told[1] or {})[105].decoded_token) == (None, "i")


def test_a_characters_text_comes_with_its_last_byte(tokenizer: Tokenizer) -> None:
    token_bytes = TokenBytes(tokenizer)
    ids = list("é😀a".encode())
    read = LogprobReader(token_bytes).read(logprobs_of(ids, [0xA9, 65, IM_END_ID]))
    own = [entry[token_id] for entry, token_id in zip(read, ids, strict=True)]
    assert [token.decoded_token for token in own] == ["", "é", "", "", "", "😀", "a"]
    assert b"".join(token.token_bytes for token in own).decode() == "é😀a"
    assert read[1][0xA9].decoded_token == "é"
    assert read[1][65].decoded_token == "\ufffdA"
    assert read[0][IM_END_ID].token_bytes == b"<|im_end|>"


def test_bytes_of_a_vocabulary_with_byte_fallback(tmp_path: Path) -> None:
    pieces = ["<unk>", "▁hello", "hello", "a", *(f"<0x{byte:02X}>" for byte in range(256))]
    model = models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[], byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    token_bytes = TokenBytes(Tokenizer(tmp_path / "tokenizer.json"))
    assert [token_bytes.of(index) for index in (1, 2, 3, 4 + 0xC3, 999)] == [b" hello", b"hello", b"a", b"\xc3", b""]


def test_prompt_chunks_may_come_again() -> None:
    """A preempted prompt starts over; what is known already is passed over, and all is told once."""
    whole = logprobs_of([11, 12, 13, 14, 15, 16], [1])
    ledger = PromptLedger(7)
    for first, stop in ((1, 3), (1, 2), (2, 5), (4, 6)):
        ledger.add(PromptChunk(first, whole.cut(first - 1, stop)))
        assert (ledger.take() is not None) == (stop == 6)
    assert ledger.take() is None
    again = PromptLedger(7)
    with pytest.raises(ValueError, match="those from 1 on are next"):
        again.add(PromptChunk(2, whole))
    again.add(PromptChunk(1, whole.cut(0, 2)))
    again.add(PromptChunk(3, whole.cut(2)))
    assert again.take() == whole


def test_packed_logprobs_can_be_cut_and_joined() -> None:
    whole = logprobs_of([1, 2, 3], [9, 8])
    assert join([whole.cut(0, 1), whole.cut(1)]) == whole
    assert whole.cut(0, 9) is whole
    assert [entry[0][0] for entry in whole.cut(1, 3).entries()] == [2, 3]
    assert join([]).num_tokens == 0


# --- what is asked --------------------------------------------------------------------------------------------------


def test_bad_words_are_banned_with_and_without_a_space(prepare: Prepare) -> None:
    params = prepare(bad_words=["no", " way"], bad_words_token_ids=[[7]]).add.params
    assert params.bad_words_token_ids == [[7], *(list(text.encode()) for text in ("no", " no", "way", " way"))]


@pytest.mark.parametrize(
    "params",
    [
        {"logit_bias": {272: 1.0}},
        {"allowed_token_ids": [272]},
        {"bad_words_token_ids": [[1], [1, 272]]},
        {"stop_token_ids": [272]},
    ],
)
def test_token_ids_lie_in_the_vocabulary(prepare: Prepare, params: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="token id 272 is outside the model's vocabulary"):
        prepare(**params)


def test_bad_words_need_a_tokenizer() -> None:
    inputs = InputProcessor(None, max_model_len=100, vocab_size=272)
    with pytest.raises(InvalidRequest, match="bad words need a tokenizer"):
        inputs.process([1], SamplingParams(bad_words=["no"]))
