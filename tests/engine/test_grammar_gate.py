"""A grammar begins where reasoning ends, also in drafts that are taken back."""

from __future__ import annotations

import random

import numpy as np
import pytest

from inferd.engine.grammar.constrained import ConstrainedOutput, Ends
from inferd.engine.grammar.gate import ReasoningGate
from inferd.engine.grammar.llguidance import LLGuidanceBackend
from inferd.engine.grammar.spec import StructuredOutput
from inferd.engine.testing.grammar import EOS_ID, byte_vocabulary

START, END = ord("<"), ord(">")
A, B, X = ord("c"), ord("d"), ord("x")
VOCABULARY = byte_vocabulary()
BACKEND = LLGuidanceBackend(VOCABULARY)


def constrained(prompt: list[int], min_tokens: int = 0) -> ConstrainedOutput:
    spec = StructuredOutput(regex="(cd)+")
    matcher = BACKEND.load(spec, BACKEND.compile(spec)).make_matcher()
    ends = Ends(VOCABULARY.eos_token_ids, (A,), min_tokens)
    return ConstrainedOutput(matcher, ends, ReasoningGate(START, END, prompt), START)


def allowed(output: ConstrainedOutput) -> set[int]:
    row = np.zeros(VOCABULARY.num_words, np.int32)
    output.fill_bitmask(row)
    return {int(index) for index in np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))}


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        ([], False),
        ([X], False),
        ([START], True),
        ([START, X], True),
        ([START, END], False),
        ([START, END, START], True),
    ],
)
def test_the_prompt_may_have_opened_it(prompt: list[int], is_open: bool) -> None:
    assert ReasoningGate(START, END, prompt).is_open is is_open


def test_inside_nothing_is_constrained_but_the_end() -> None:
    output = constrained([START])
    assert EOS_ID not in allowed(output)
    assert {X, END, START} <= allowed(output)
    assert not output.accept(EOS_ID)
    for token_id in (X, A, START, END):
        assert output.accept(token_id)
    assert allowed(output) == {A}
    assert not output.accept(END)


def test_only_the_first_token_may_open_it() -> None:
    output = constrained([X])
    assert START in allowed(output)
    assert not output.accept(B)  # refused, and forgotten
    assert output.accept(A)
    assert START not in allowed(output)
    assert not output.accept(START)


def test_min_tokens_counts_reasoning_and_bars_stop_tokens() -> None:
    output = constrained([START], min_tokens=4)
    for token_id in (X, END, A, B):
        assert (EOS_ID in allowed(output)) is False
        assert output.accept(token_id)
    assert EOS_ID in allowed(output)
    assert output.accept(EOS_ID)
    assert output.is_ended


@pytest.mark.parametrize("seed", range(30))
def test_going_back_over_the_border_changes_nothing(seed: int) -> None:
    rng = random.Random(seed)
    prompt = [] if seed % 2 else [START]
    tokens = [*([START] if not prompt else []), X, B, END, A, B, A, B, EOS_ID]
    output = constrained(prompt)
    masks: list[set[int]] = []
    at = 0
    while at < len(tokens):
        if at and rng.random() < 0.4:
            back = rng.randint(1, at)
            output.rollback(back)
            at -= back
        elif at < len(masks):
            assert allowed(output) == masks[at]
        else:
            masks.append(allowed(output))
        assert tokens[at] in masks[at] if at < len(masks) else True
        assert output.accept(tokens[at])
        at += 1
    assert output.is_ended


def test_drafts_that_leave_the_block() -> None:
    output = constrained([START])
    rows = [np.zeros(VOCABULARY.num_words, np.int32) for _ in range(5)]
    for _ in range(2):
        output.fill_window(rows, [X, END, A, X])
        sets = [set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()) for row in rows]
        assert X in sets[0]
        assert X in sets[1]
        assert sets[2] == {A}
        assert sets[3] == {B}
        assert len(sets[4]) == 32 * VOCABULARY.num_words  # behind a draft that may not come
