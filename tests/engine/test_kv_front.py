"""The prefix cache as callers of the offline front see it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from inferd.engine.frontend.llm import LLM
from inferd.engine.params import SamplingParams
from inferd.engine.testing.model_folder import make_model_folder


@pytest.mark.parametrize("in_process", [True, False])
def test_a_reset_forgets_what_was_cached(tmp_path: Path, in_process: bool) -> None:
    options = dict(executor="scripted", device="cpu", block_size=4, max_model_len=256)
    folder, run_dir = make_model_folder(tmp_path / "model"), Path(os.environ["XDG_RUNTIME_DIR"])
    with LLM(folder, in_process=in_process, run_dir=run_dir, **options) as llm:  # type: ignore[arg-type]

        def cached_tokens() -> int:
            (output,) = llm.generate("a prompt of some length", SamplingParams(max_tokens=2))
            return output.num_cached_tokens

        assert [cached_tokens(), cached_tokens()] == [0, 20]
        assert llm.reset_prefix_cache()
        assert cached_tokens() == 0
