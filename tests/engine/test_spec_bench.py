"""The copying row of `inferd bench`."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferd.engine.bench import copying
from inferd.engine.bench.copying import CopyingGain, measure_copying
from inferd.engine.config import EngineArgs
from inferd.engine.testing.random_checkpoint import make_random_checkpoint


def test_both_engines_do_the_same_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "TEXT", "A text of sixty letters, more or less, to be said once more.")
    folder = make_random_checkpoint(tmp_path / "model", max_position_embeddings=512)
    said: list[str] = []
    gain = measure_copying(EngineArgs(str(folder), dtype="float32", kernels="torch"), said.append)
    assert len(said) == 2 * copying.ROUNDS
    assert gain.is_same
    assert gain.copied_share < 0.5  # a random model does not copy
    assert min(gain.plain_tokens_per_s, gain.guessed_tokens_per_s) > 0


def test_a_gain_says_what_it_is() -> None:
    gain = CopyingGain(50.0, 200.0, copied_share=1.0, accepted_share=0.9, is_same=True)
    assert gain.ratio == 4.0
    assert str(gain) == (
        "copying a text: 200.0 tok/s with n-gram guesses, 50.0 without, ratio 4.00; 90% of the guesses stood, "
        "100% of the output is the text, the same with guesses and without"
    )
