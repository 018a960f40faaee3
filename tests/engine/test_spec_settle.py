"""What `speculative` may be, and what it is refused for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inferd.engine.config import EngineArgs, EngineConfig, SpeculativeArgs
from inferd.engine.errors import ConfigError, LoadError, NotSupported
from inferd.engine.resolve import Hardware, resolve
from inferd.engine.testing.encoder_folder import make_encoder_folder
from inferd.engine.testing.model_folder import MODEL_VOCAB_SIZE, make_model_folder

CPU = Hardware(num_cpus=2, has_cuda=False, fast_bfloat16=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_model_folder(tmp_path / "model")


def settle(folder: Path, wanted: SpeculativeArgs | None, **options: Any) -> EngineConfig:
    return resolve(EngineArgs(str(folder), speculative=wanted, **options), CPU)


def test_nothing_is_guessed_unless_asked(folder: Path) -> None:
    config = settle(folder, None)
    assert config.speculative is None
    assert config.scheduler.num_speculative_tokens == config.scheduler.num_lookahead_tokens == 0


def test_prompt_lookup(folder: Path) -> None:
    config = settle(folder, SpeculativeArgs("ngram", num_speculative_tokens=7, prompt_lookup_max=4))
    settled = config.speculative
    assert settled is not None
    assert (settled.num_tokens, settled.prompt_lookup_min, settled.prompt_lookup_max) == (7, 3, 4)
    assert (config.scheduler.num_speculative_tokens, config.scheduler.num_lookahead_tokens) == (7, 0)
    assert "speculative: up to 7 tokens are drafted from what followed on the last 3 to 4 before" in config.decisions


def test_a_draft_model(folder: Path, tmp_path: Path) -> None:
    draft = make_model_folder(tmp_path / "small", config={"num_hidden_layers": 1})
    config = settle(folder, SpeculativeArgs("draft", model=str(draft)))
    settled = config.speculative
    assert settled is not None
    assert settled.model is not None
    assert settled.model.path == draft
    assert settled.load_format == "safetensors"
    assert config.scheduler.num_lookahead_tokens == 5
    assert "speculative: up to 5 tokens are drafted by small" in config.decisions
    (draft / "model.gguf").touch()
    gguf = settle(folder, SpeculativeArgs("draft", model=str(draft))).speculative
    assert gguf is not None
    assert gguf.load_format == "gguf"


def test_embeddings_may_be_padded_differently(folder: Path, tmp_path: Path) -> None:
    draft = make_model_folder(tmp_path / "small", config={"vocab_size": MODEL_VOCAB_SIZE + 8})
    assert settle(folder, SpeculativeArgs("draft", model=str(draft))).speculative is not None
    (draft / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="small has 280 tokens, model has 272"):
        settle(folder, SpeculativeArgs("draft", model=str(draft)))


def test_a_draft_model_must_have_the_same_vocabulary(folder: Path, tmp_path: Path) -> None:
    draft = make_model_folder(tmp_path / "small")
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["A"], vocab["B"] = vocab["B"], vocab["A"]
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="small and model have different vocabularies, as in 'A'"):
        settle(folder, SpeculativeArgs("draft", model=str(draft)))


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (SpeculativeArgs("eagle"), "method='eagle' is not known; choose one of ngram, draft"),  # type: ignore[arg-type]
        (SpeculativeArgs("ngram", num_speculative_tokens=0), "num_speculative_tokens must be 1 to 32, got 0"),
        (SpeculativeArgs("ngram", num_speculative_tokens=33), "num_speculative_tokens must be 1 to 32, got 33"),
        (SpeculativeArgs("ngram", prompt_lookup_min=6), "prompt_lookup_min=6 must be at least 1 and at most"),
        (SpeculativeArgs("ngram", prompt_lookup_min=0), "prompt_lookup_min=0 must be at least 1 and at most"),
        (SpeculativeArgs("ngram", model="/m"), "method=ngram has no use for model=/m"),
        (SpeculativeArgs("draft"), "method=draft needs a model, the folder of one"),
    ],
)
def test_what_cannot_be(folder: Path, wanted: SpeculativeArgs, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settle(folder, wanted)


def test_the_draft_models_folder_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="nowhere"):
        settle(folder, SpeculativeArgs("draft", model=str(tmp_path / "nowhere")))


def test_what_does_not_go_together(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(NotSupported, match="executor=scripted, which has no model to draft for"):
        settle(folder, SpeculativeArgs("ngram"), executor="scripted")
    with pytest.raises(ConfigError, match="speculative is for models that generate"):
        settle(folder, SpeculativeArgs("ngram"), runner="pooling")
    encoder = make_encoder_folder(tmp_path / "encoder", "BertModel")
    with pytest.raises(NotSupported, match="encoder does not generate, so it cannot draft"):
        settle(folder, SpeculativeArgs("draft", model=str(encoder)))
    windowed = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 8}
    narrow = make_model_folder(tmp_path / "windowed", config=windowed)
    with pytest.raises(NotSupported, match="layers all have a window"):
        settle(narrow, SpeculativeArgs("draft", model=str(folder)))
    assert settle(narrow, SpeculativeArgs("ngram")).speculative is not None
