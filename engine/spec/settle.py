"""The speculative part of `EngineArgs` → `SpeculativeConfig`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

from inferd.engine.config import (
    Device,
    EngineArgs,
    ModelConfig,
    SpeculativeArgs,
    SpeculativeConfig,
    SpeculativeMethod,
)
from inferd.engine.errors import ConfigError, NotSupported
from inferd.engine.frontend.tokenizer import Tokenizer
from inferd.engine.model_config import read_model_config

MOST_TOKENS = 32  # of a draft: each costs a row of logits in a step
# Of steps of 135M parameters on two processor cores and of 8B on an H200: that of one row, against those of many.
FIXED_ROWS: dict[Device, int] = {"cpu": 10, "cuda": 50}
FIELD = "speculative"


def settle_speculative(
    args: EngineArgs, model: ModelConfig, device: Device, decisions: list[str]
) -> SpeculativeConfig | None:
    """Raises ConfigError naming the option, NotSupported for what cannot be combined, LoadError for the draft model's
    folder."""
    wanted = args.speculative
    if wanted is None:
        return None
    _check(wanted, args)
    draft = _draft_model(wanted, model)
    if draft is not None:
        how = f"by {draft.path.name}"
    else:
        how = f"from what followed on the last {wanted.prompt_lookup_min} to {wanted.prompt_lookup_max} before"
    decisions.append(f"speculative: up to {wanted.num_speculative_tokens} tokens are drafted {how}")
    return SpeculativeConfig(
        method=wanted.method,
        num_tokens=wanted.num_speculative_tokens,
        prompt_lookup_min=wanted.prompt_lookup_min,
        prompt_lookup_max=wanted.prompt_lookup_max,
        num_fixed_rows=FIXED_ROWS[device],
        model=draft,
        load_format=_load_format(args, draft),
    )


def _check(wanted: SpeculativeArgs, args: EngineArgs) -> None:
    methods = get_args(SpeculativeMethod)
    if wanted.method not in methods:
        raise ConfigError(f"{FIELD}: method={wanted.method!r} is not known; choose one of {', '.join(methods)}")
    if args.executor == "scripted":
        raise NotSupported(f"{FIELD} is not supported by executor=scripted, which has no model to draft for")
    if not 1 <= wanted.num_speculative_tokens <= MOST_TOKENS:
        raise ConfigError(
            f"{FIELD}: num_speculative_tokens must be 1 to {MOST_TOKENS}, got {wanted.num_speculative_tokens}"
        )
    if not 1 <= wanted.prompt_lookup_min <= wanted.prompt_lookup_max:
        raise ConfigError(
            f"{FIELD}: prompt_lookup_min={wanted.prompt_lookup_min} must be at least 1 and at most "
            f"prompt_lookup_max={wanted.prompt_lookup_max}"
        )
    if (wanted.model is None) == (wanted.method == "draft"):
        said = "needs a model, the folder of one" if wanted.model is None else f"has no use for model={wanted.model}"
        raise ConfigError(f"{FIELD}: method={wanted.method} {said}")


def _draft_model(wanted: SpeculativeArgs, model: ModelConfig) -> ModelConfig | None:
    if wanted.model is None:
        return None
    if all(model.window_of(layer) is not None for layer in range(model.num_layers)):
        raise NotSupported(
            f"{FIELD}: method=draft is not supported for a model whose layers all have a window, because the draft "
            "model keeps its keys and values in the blocks of a layer without; choose method=ngram",
            param=FIELD,
        )
    draft = read_model_config(Path(wanted.model))
    if draft.encoder is not None or draft.pooler is not None:
        raise NotSupported(f"{FIELD}: {draft.path} does not generate, so it cannot draft", param=FIELD)
    _check_vocabulary(draft, model)
    return draft


def _check_vocabulary(draft: ModelConfig, model: ModelConfig) -> None:
    """The same ids for the same texts. Checkpoints of one family pad their embeddings differently; without tokenizers
    to compare, only equal sizes will do."""
    files = [config.path / "tokenizer.json" for config in (draft, model)]
    if all(file.is_file() for file in files):
        own, others = (Tokenizer(file).backend.get_vocab(with_added_tokens=True) for file in files)
        if own != others:
            different = next(iter(sorted(own.items() ^ others.items())))
            raise ConfigError(
                f"{FIELD}: {draft.path.name} and {model.path.name} have different vocabularies, as in "
                f"{different[0]!r:.40}; a draft model must have the same one"
            )
    elif draft.vocab_size != model.vocab_size:
        raise ConfigError(
            f"{FIELD}: {draft.path.name} has {draft.vocab_size} tokens, {model.path.name} has {model.vocab_size}; "
            "a draft model must have the same vocabulary"
        )


def _load_format(args: EngineArgs, draft: ModelConfig | None) -> Literal["safetensors", "gguf", "dummy"]:
    if args.load_format == "dummy":
        return "dummy"
    return "gguf" if draft is not None and any(draft.path.glob("*.gguf")) else "safetensors"
