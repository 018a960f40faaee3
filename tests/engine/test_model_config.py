"""Model folders in the terms of both generations of transformers; hostile and incomplete ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inferd.engine.config import ModelConfig, RopeConfig
from inferd.engine.errors import LoadError
from inferd.engine.model_config import read_model_config

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}

Read = Callable[..., ModelConfig]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def write_and_read(generation: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
        (tmp_path / "config.json").write_text(json.dumps({**BASE, **changes}))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return read_model_config(tmp_path)

    return write_and_read


def test_plain_llama(read: Read) -> None:
    config = read()
    assert (config.head_size, config.num_kv_heads, config.norm_eps) == (16, 2, 1e-5)
    assert config.eos_token_ids == (2,)
    assert not (config.attention_bias)
    assert not (config.qk_norm)
    assert not config.tie_embeddings


def test_generation_config_names_every_end_of_turn(read: Read) -> None:
    assert read({"eos_token_id": [7, 2]}).eos_token_ids == (7, 2)


def test_an_end_that_the_model_cannot_sample_is_none(read: Read) -> None:
    assert read({"eos_token_id": [7, 100]}).eos_token_ids == (7,)


@pytest.mark.parametrize("eos_token", ["<|im_end|>", {"content": "<|im_end|>", "lstrip": False}])
def test_the_tokenizers_own_end_counts_too(read: Read, tmp_path: Path, eos_token: Any) -> None:
    """Fine-tuned chat models often name the end of a turn there alone."""
    added = [{"id": 9, "content": "<|im_start|>", "special": True}, {"id": 8, "content": "<|im_end|>", "special": True}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos_token}))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added, "model": {"vocab": {"</s>": 3}}}))
    assert read().eos_token_ids == (2, 8)
    assert read({"eos_token_id": [8, 5]}).eos_token_ids == (8, 5)


@pytest.mark.parametrize("tokenizer", ['{"added_tokens": 3}', '{"added_tokens": [{"id": "x", "content": "y"}]}', "["])
def test_a_broken_tokenizer_file_is_named(read: Read, tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (tmp_path / "tokenizer.json").write_text(tokenizer)
    with pytest.raises(LoadError, match=r"tokenizer\.json"):
        read()


@pytest.mark.parametrize(
    ("fields", "rope"),
    [
        ({"rope_theta": 5e5}, RopeConfig(theta=5e5)),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, RopeConfig(theta=5e5)),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0}},
            RopeConfig(theta=1e4, scaling="linear", factor=4.0),
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 256,
                }
            },
            RopeConfig(scaling="llama3", factor=8.0, original_max_position=256),
        ),
    ],
)
def test_rope_in_both_spellings(read: Read, fields: dict[str, Any], rope: RopeConfig) -> None:
    assert read(**fields).rope == rope


def test_qwen_takes_its_window_only_when_switched_on(read: Read) -> None:
    assert read(architectures=["Qwen2ForCausalLM"], sliding_window=128).sliding_window is None
    assert read(architectures=["MistralForCausalLM"], sliding_window=128).sliding_window == 128


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"architectures": ["MistralForCausalLM"]}, [8, 8, 8, 8]),
        ({"architectures": ["Gemma2ForCausalLM"]}, [8, None, 8, None]),
        ({"architectures": ["Gemma3ForCausalLM"]}, [8, 8, 8, 8]),
        ({"architectures": ["Gemma3ForCausalLM"], "sliding_window_pattern": 3}, [8, 8, None, 8]),
        ({"architectures": ["MistralForCausalLM"], "layer_types": ["full_attention", "sliding_attention"] * 2}, None),
        ({"architectures": ["Gemma2ForCausalLM"], "layer_types": ["full_attention"] * 4}, [None] * 4),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "max_window_layers": 3},
            [None, None, None, 8],
        ),
    ],
)
def test_which_layers_have_a_window(read: Read, fields: dict[str, Any], windows: list[int | None] | None) -> None:
    config = read(**fields, num_hidden_layers=4, sliding_window=8)
    assert [config.window_of(layer) for layer in range(4)] == (windows or [None, 8, None, 8])


def test_gemma_of_both_generations(read: Read) -> None:
    old = read(
        architectures=["Gemma3ForCausalLM"],
        sliding_window=8,
        sliding_window_pattern=2,
        rope_theta=5e5,
        rope_local_base_freq=2e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        query_pre_attn_scalar=64,
    )
    new = read(
        architectures=["Gemma3ForCausalLM"],
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
        query_pre_attn_scalar=64,
    )
    assert old == new
    assert new.rope_of(0) == RopeConfig(theta=2e4)
    assert new.rope_of(1) == RopeConfig(theta=5e5, scaling="linear", factor=8.0)
    assert (new.attention_scale, new.attention_softcap, new.logit_softcap) == (0.125, None, None)
    assert (new.head_size, new.activation, new.tie_embeddings) == (256, "gelu_tanh", True)
    bare = read(architectures=["Gemma3ForCausalLM"])
    assert (bare.rope, bare.windowed_rope, bare.attention_scale) == (RopeConfig(1e6), RopeConfig(1e4), 1 / 16)
    second = read(architectures=["Gemma2ForCausalLM"], final_logit_softcapping=None)
    assert (second.attention_softcap, second.logit_softcap, second.windowed_rope) == (50.0, None, None)


def test_qwen2_has_biases_on_q_k_v_only(read: Read) -> None:
    config = read(architectures=["Qwen2ForCausalLM"])
    assert config.attention_bias
    assert not config.output_bias


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "supported: .*LlamaForCausalLM"),
        ({"architectures": []}, "architectures"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"vocab_size": 1e3}, "vocab_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"dtype": "float8"}, "dtype"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window"),
        ({"layer_types": ["full_attention"]}, "each of 2 layers"),
        ({"layer_types": ["full_attention", "linear_attention"]}, r"linear_attention.*\(recurrent state\)"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, r"chunked_attention.*chunked local attention"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 2.0}}}, "by type of layer"),
        ({"architectures": ["Gemma3ForCausalLM"], "hidden_activation": "gelu"}, "hidden_activation"),
        ({"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"eos_token_id": "x"}, "eos_token_id"),
    ],
)
def test_wrong_fields_are_named(read: Read, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(LoadError, match=named):
        read(**changes)


@pytest.mark.parametrize(
    "trick",
    [
        {"auto_map": {"AutoModel": "evil.Model"}},
        {"text_config": {"nested": [{"trust_remote_code": True}]}},
        {"_attn_implementation_internal": "someone/kernel"},
        {"custom_code": 1},
    ],
)
def test_code_of_its_own_is_refused(read: Read, trick: dict[str, Any]) -> None:
    with pytest.raises(LoadError, match="code of its own"):
        read(**trick)


def test_code_in_the_tokenizer_files_is_refused(read: Read, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {}}')
    with pytest.raises(LoadError, match=r"tokenizer_config\.json"):
        read()


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a":' * 100_000])
def test_broken_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(LoadError, match=r"config\.json"):
        read_model_config(tmp_path)


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="not a model folder"):
        read_model_config(tmp_path / "nothing")
