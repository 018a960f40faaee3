"""A GGUF file becomes a model folder: in a confined child, with the meaning of the original checkpoint."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoTokenizer,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from inferd.engine.errors import LoadError
from inferd.engine.importer import sandbox
from inferd.engine.importer.main import import_file
from inferd.engine.importer.run import import_gguf, run_child
from inferd.engine.loader.gguf import iterate_gguf
from inferd.engine.loader.gguf_header import read_header
from inferd.engine.model_config import read_model_config
from inferd.engine.testing.tiny_gguf import tiny_metadata, tiny_tensors, write_gguf

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
SIZES: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "eos_token_id": [2, 0],
    "bos_token_id": 1,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}


def random_model(config: PretrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model


def gguf_tensors(model: PreTrainedModel, architecture: str) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """What a converter to GGUF writes for this model, tied heads left out."""
    tensors = {}
    heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        is_gemma = architecture.startswith("gemma")
        for theirs, ours in (NAMES | (GEMMA_NAMES if is_gemma else {})).items():
            name = name.replace(theirs, ours)
        if is_gemma and name.endswith("norm.weight"):
            tensor = tensor + 1
        num_heads = heads.get(name.split(".")[-2])
        if architecture == "llama" and num_heads:
            halves = tensor.view(num_heads, 2, -1, *tensor.shape[1:])
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
        tensors[name] = tensor.numpy()
    return tensors


def rope_factors(head_size: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Factors of `LLAMA3_ROPE` by transformers' own formula."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(**SIZES | {"head_dim": head_size}, rope_parameters=LLAMA3_ROPE)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500000.0 ** (-torch.arange(0, head_size, 2) / head_size)
    return (plain / scaled).numpy().astype(np.float32)


CHECKPOINTS: dict[str, tuple[str, PretrainedConfig, dict[str, Any]]] = {
    "gemma2": (
        "gemma2",
        Gemma2Config(**SIZES, head_dim=8, sliding_window=5, query_pre_attn_scalar=8, attn_logit_softcapping=2.0),
        {
            "gemma2__attention__key_length": 8,
            "gemma2__attention__sliding_window": 5,
            "gemma2__attn_logit_softcapping": 2.0,
            "gemma2__final_logit_softcapping": 30.0,
        },
    ),
    "gemma3": (
        "gemma3",
        Gemma3TextConfig(
            **SIZES | {"num_hidden_layers": 7},
            head_dim=8,
            sliding_window=5,
            query_pre_attn_scalar=8,
            rope_parameters={
                "full_attention": LINEAR_ROPE | {"rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        ),
        {
            "gemma3__block_count": 7,
            "gemma3__attention__key_length": 8,
            "gemma3__attention__sliding_window": 5,
            "gemma3__rope__freq_base": 1000000.0,
            "gemma3__rope__scaling__type": "linear",
            "gemma3__rope__scaling__factor": 2.0,
        },
    ),
    "llama, tied": ("llama", LlamaConfig(**SIZES, tie_word_embeddings=True), {}),
    "llama, untied": ("llama", LlamaConfig(**SIZES, tie_word_embeddings=False), {}),
    "llama, biases": ("llama", LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True), {}),
    "llama, head size": ("llama", LlamaConfig(**SIZES, head_dim=32), {"llama__attention__key_length": 32}),
    "llama, linear rope": (
        "llama",
        LlamaConfig(**SIZES, rope_parameters=LINEAR_ROPE),
        {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 2.0},
    ),
    "llama 3 rope": (
        "llama",
        LlamaConfig(**SIZES, head_dim=64, rope_parameters=LLAMA3_ROPE),
        {"llama__rope__freq_base": 500000.0, "llama__attention__key_length": 64},
    ),
    "mistral": (
        "llama",
        MistralConfig(**SIZES, sliding_window=4, head_dim=8),
        {"llama__attention__sliding_window": 4},
    ),
    "qwen2": ("qwen2", Qwen2Config(**SIZES), {}),
    "qwen3": ("qwen3", Qwen3Config(**SIZES, head_dim=16), {"qwen3__attention__key_length": 16}),
}


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_an_imported_model_computes_what_the_original_does(tmp_path: Path, case: str) -> None:
    architecture, config, changes = CHECKPOINTS[case]
    model = random_model(config)
    tensors = gguf_tensors(model, architecture)
    if case == "llama 3 rope":
        tensors["rope_freqs.weight"] = rope_factors(64)
    source = write_gguf(tmp_path / "model.gguf", tiny_metadata(architecture, **changes), tensors)
    import_file(source, tmp_path)

    config_again = AutoConfig.from_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_config(config_again, dtype=torch.float32).eval()
    assert type(again) is type(model)
    weights = dict(iterate_gguf(source, read_model_config(tmp_path), torch.float32))
    missing, unexpected = again.load_state_dict(weights, strict=False)
    assert unexpected == []
    assert missing == (["lm_head.weight"] if config.tie_word_embeddings else [])
    again.tie_weights()
    ids = torch.arange(3, 27).view(1, -1)
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("architecture", "num_layers", "scalar"),
    [("gemma2", 26, 8), ("gemma2", 46, 16), ("gemma3", 46, 8), ("gemma3", 62, 16)],
)
def test_the_largest_gemmas_scale_scores_by_their_hidden_size(
    tmp_path: Path, architecture: str, num_layers: int, scalar: int
) -> None:
    changes = {
        f"{architecture}__block_count": num_layers,
        f"{architecture}__embedding_length": 64,
        f"{architecture}__attention__key_length": 8,
        f"{architecture}__attention__sliding_window": 5,
    }
    import_file(write_gguf(tmp_path / "model.gguf", tiny_metadata(architecture, **changes), tiny_tensors()), tmp_path)
    assert read_model_config(tmp_path).attention_scale == scalar**-0.5


def test_folder_is_complete_and_in_hugging_faces_terms(tmp_path: Path) -> None:
    import_file(write_gguf(tmp_path / "model.gguf", tiny_metadata(), tiny_tensors()), tmp_path)

    assert {path.name for path in tmp_path.iterdir()} == {
        "model.gguf",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    config = read_model_config(tmp_path)
    assert (config.norm_eps, config.eos_token_ids, config.checkpoint_dtype) == (1e-5, (2, 0), "bfloat16")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "hello"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<|im_start|>user\nhello<|im_end|>\n"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


@pytest.mark.parametrize(
    ("changes", "end_ids"),
    [
        ({"tokenizer__ggml__eos_token_id": None}, [0, 2]),
        ({"tokenizer__ggml__eos_token_id": 1}, [1, 0, 2]),
        ({"tokenizer__ggml__eot_token_id": 5, "tokenizer__ggml__eom_token_id": 6}, [2, 5, 6, 0]),
    ],
)
def test_whatever_ends_a_turn_ends_an_answer(tmp_path: Path, changes: dict[str, Any], end_ids: list[int]) -> None:
    import_file(write_gguf(tmp_path / "model.gguf", tiny_metadata(**changes), tiny_tensors()), tmp_path)
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / name).read_text())["eos_token_id"] == end_ids


UNSUPPORTED = {
    "architecture": (tiny_metadata("phi3"), "'phi3' is not supported; supported: gemma2, gemma3, llama, qwen2, qwen3"),
    "experts": (tiny_metadata(llama__expert_count=8), r"llama\.expert_count: 8 is not supported"),
    "rope": (tiny_metadata(llama__rope__scaling__type="yarn"), "'yarn' is not supported; supported: none, linear"),
    "partial rope": (tiny_metadata(llama__rope__dimension_count=4), "other than the head size 8 is not supported"),
    "window": (tiny_metadata("qwen2", qwen2__attention__sliding_window=8), "not supported for this architecture"),
    "no window": (tiny_metadata("gemma3"), r"gemma3\.attention\.sliding_window: must be an integer, but is missing"),
    "encoder": (tiny_metadata(llama__attention__causal=False), r"causal: False is not supported"),
    "no layers": (tiny_metadata(llama__block_count=0), "block_count: must be positive"),
    "no size": (tiny_metadata(llama__embedding_length=None), "embedding_length: must be an integer, but is missing"),
    "NaN": (tiny_metadata(llama__attention__layer_norm_rms_epsilon=float("nan")), "epsilon: must be positive"),
    "heads": (tiny_metadata(llama__attention__head_count_kv=3), "not a multiple of 3"),
    "heads by layer": (tiny_metadata(llama__attention__head_count=[4, 2]), "head_count: must be an integer"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_what_the_engine_cannot_do_is_refused_by_name(tmp_path: Path, case: str) -> None:
    metadata, cause = UNSUPPORTED[case]
    source = write_gguf(tmp_path / "model.gguf", metadata, tiny_tensors())
    with pytest.raises(LoadError, match=cause):
        import_file(source, tmp_path)
    assert not (tmp_path / "config.json").exists()


def test_unknown_rope_factors_are_refused(tmp_path: Path) -> None:
    tensors = tiny_tensors() | {"rope_freqs.weight": np.array([1, 2, 3, 1], np.float32)}
    with pytest.raises(LoadError, match="not what Llama 3's rope scaling gives"):
        import_file(write_gguf(tmp_path / "model.gguf", tiny_metadata(), tensors), tmp_path)


def test_import_runs_in_a_child_and_passes_its_error_on(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "model.gguf", tiny_metadata(), tiny_tensors())
    assert import_gguf(source, tmp_path) == "F32"
    assert read_model_config(tmp_path).vocab_size == 264

    source.write_bytes(source.read_bytes()[:500])
    with pytest.raises(LoadError, match=r"^model\.gguf: metadata .*truncated\?$"):
        import_gguf(source, tmp_path)
    with pytest.raises(LoadError, match="No such file or directory"):
        import_gguf(write_gguf(tmp_path / "b.gguf", tiny_metadata(), tiny_tensors()), tmp_path / "missing")


def test_a_mutated_file_raises_only_load_errors(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "model.gguf", tiny_metadata(), tiny_tensors(), "Q8_0")
    data = source.read_bytes()
    end = min(tensor.offset_bytes for tensor in read_header(source).tensors)
    random_, num_refused = random.Random(11), 0
    for _ in range(400):
        mutated = bytearray(data)
        mutated[random_.randrange(end)] ^= 1 << random_.randrange(8)
        source.write_bytes(mutated)
        try:
            import_file(source, tmp_path)
            list(iterate_gguf(source, read_model_config(tmp_path), torch.float32))
        except LoadError:
            num_refused += 1
    assert 0 < num_refused < 400


def test_a_link_in_the_folder_is_not_followed(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "model.gguf", tiny_metadata(), tiny_tensors())
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    (tmp_path / ".tokenizer.json.partial").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        import_file(source, tmp_path)
    assert victim.read_text() == "untouched"


def test_neither_side_of_an_import_needs_torch() -> None:
    modules = "inferd.engine.importer.main, inferd.engine.importer.run, inferd.engine.convert"
    script = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-P", "-c", script], timeout=60, check=True)


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("import time; time.sleep(60)", r"^m\.gguf: took longer than 1 s and was stopped$"),
        ("import os; os.kill(os.getpid(), 9)", r"^m\.gguf: the import process ended by signal 9: it said nothing$"),
        ("raise KeyError('boo')", r"^m\.gguf: the import process ended with status 1: .*KeyError: 'boo'"),
        ("print('not JSON')", r"^m\.gguf: the import process ended with status 0: it said nothing$"),
    ],
)
def test_a_child_that_does_not_report_is_an_error(statement: str, message: str) -> None:
    with pytest.raises(LoadError, match=message):
        run_child("timeit", ["-n1", "-r1", statement], "m.gguf", timeout_s=1.0)


def test_the_child_sees_nothing_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    tell = "import os, json; print(json.dumps({'error': str(dict(os.environ))}), flush=True); os._exit(0)"
    with pytest.raises(LoadError) as caught:
        run_child("timeit", ["-n1", "-r1", tell], "m.gguf", timeout_s=20.0)
    assert "PYTHONPATH" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_the_child_is_confined() -> None:
    script = """
from inferd.engine.errors import LoadError
from inferd.engine.importer import sandbox
sandbox.confine()
sandbox.report(lambda: bytearray(8 << 30) and None)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert "more than the 4 GB of memory" in json.loads(done.stdout)["error"]


def test_a_child_whose_parent_is_gone_already_ends(tmp_path: Path) -> None:
    """The parent died while the child was still starting: nobody will be watched for."""
    script = """
from inferd.engine.importer import sandbox
sandbox.confine()
print("went on")
"""
    environment = os.environ | {sandbox.PARENT_VARIABLE: str(os.getpid())}
    with_parent = [sys.executable, "-P", "-c", script]
    done = subprocess.run(with_parent, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "went on\n"
    orphan = ["/bin/sh", "-c", '"$@"; exit $?', "sh", *with_parent]
    done = subprocess.run(orphan, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.returncode) == ("", sandbox.EXIT_PARENT_DIED)


def test_the_child_dies_with_its_parent() -> None:
    child = """
import time
from inferd.engine.importer import sandbox
sandbox.confine()
print(1, flush=True)
time.sleep(60)
"""
    parent = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {child!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        orphan = psutil.Process(int(process.stdout.readline()))
        os.kill(process.pid, signal.SIGKILL)
    for _ in range(500):
        if not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.01)
    orphan.kill()
    pytest.fail("the child outlived its parent")


@pytest.fixture(scope="module")
def real_model(bundled_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The default model's GGUF file, and a folder that it was just imported into."""
    (source,) = bundled_model.glob("*.gguf")
    folder = tmp_path_factory.mktemp("real")
    import_gguf(source, folder)
    return source, folder


def test_real_tokenizer(real_model: tuple[Path, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(real_model[1])
    assert len(tokenizer) == 49152
    assert tokenizer("<|im_start|>").input_ids == [1]
    assert tokenizer.tokenize("12 345") == ["1", "2", "Ġ", "3", "4", "5"]
    for text in ("Hello  world\n\n\tdef f(x): return x**2  # é 日本語 😀", "   ", "it's 3.14", "\u200d👩‍👩‍👧 ﷽"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    expected = [2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182]
    assert tokenizer(system).input_ids == expected


def test_real_model_knows_the_capital_of_france(real_model: tuple[Path, Path]) -> None:
    source, folder = real_model
    model = LlamaForCausalLM(AutoConfig.from_pretrained(folder)).float().eval()
    model.load_state_dict(dict(iterate_gguf(source, read_model_config(folder), torch.float32)), strict=False)
    model.tie_weights()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."
