"""The files that sentence-transformers puts beside a model: which modules follow it, and how texts are prepared.

Only a model, then pooling, then perhaps normalisation is served; any other module is refused by its name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from inferd.engine.errors import LoadError
from inferd.engine.model_fields import Fields
from inferd.engine.pooling.config import PoolingType

MODULES_FILE = "modules.json"
TEXT_FILES = ("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_xlm-roberta_config.json")
MAX_BYTES = 1 << 20
# By the name at the end of `pooling_mode_…`, and by the newer single field's value.
POOLING_TYPES: dict[str, PoolingType] = {
    "cls_token": "cls",
    "mean_tokens": "mean",
    "lasttoken": "last",
    "cls": "cls",
    "mean": "mean",
}

_PACKAGE = "sentence_transformers."
_PLAIN_FOLDER = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class SentenceModel:
    pooling: PoolingType
    normalize: bool
    max_tokens: int | None
    lower_case: bool


class _Module(msgspec.Struct):
    type: str
    path: str = ""


def read_sentence_model(folder: Path) -> SentenceModel | None:
    """None for a folder without `modules.json`. Raises `LoadError` naming the file and what is not supported in it."""
    path = folder / MODULES_FILE
    if not path.exists():
        return None
    modules = _read(path, list[_Module])
    kinds = [_kind_of(module, path) for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise LoadError(
            f"{path}: the modules {', '.join(kinds) or '(none)'} are not supported; supported: Transformer, then "
            "Pooling, then perhaps Normalize"
        )
    if modules[0].path:
        raise LoadError(
            f'{path}: a model in the folder "{modules[0].path}" is not supported, only one beside this file'
        )
    max_tokens, lower_case = _read_text_settings(folder)
    return SentenceModel(_read_pooling(folder, modules[1], path), len(kinds) == 3, max_tokens, lower_case)


def _kind_of(module: _Module, path: Path) -> str:
    if not module.type.startswith(_PACKAGE):
        raise LoadError(f'{path}: module "{module.type}" is code of its own; a model is data here and is refused')
    return module.type.rpartition(".")[2]


def _read_pooling(folder: Path, module: _Module, modules_path: Path) -> PoolingType:
    if not _PLAIN_FOLDER.fullmatch(module.path):
        raise LoadError(f'{modules_path}: "{module.path}" is no folder beside this file')
    fields = _fields(folder / module.path / "config.json")
    modes = [name.removeprefix("pooling_mode_") for name, on in fields.values.items() if _is_mode(name) and on is True]
    if (single := fields.values.get("pooling_mode")) is not None:
        modes = list(single) if isinstance(single, list) else [single]
    if len(modes) != 1 or modes[0] not in POOLING_TYPES:
        named = " and ".join(map(str, modes)) or "none"
        known = ", ".join(POOLING_TYPES)
        raise fields.error("pooling_mode", f"{named} is not supported; one of these is: {known}")
    return POOLING_TYPES[modes[0]]


def _is_mode(name: str) -> bool:
    return name.startswith("pooling_mode_")


def _read_text_settings(folder: Path) -> tuple[int | None, bool]:
    """The longest text in tokens, where given, and whether texts are lower-cased first."""
    path = next((folder / name for name in TEXT_FILES if (folder / name).exists()), None)
    if path is None:
        return None, False
    fields = _fields(path)
    given = fields.values.get("max_seq_length") is not None
    return fields.whole("max_seq_length") if given else None, fields.flag("do_lower_case", False)


def _fields(path: Path) -> Fields:
    return Fields(_read(path, dict[str, Any]), path)


def _read(path: Path, kind: Any) -> Any:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise LoadError(f"{path} is larger than {MAX_BYTES} bytes, too large for a configuration file")
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        raise LoadError(f"{path} is missing: {MODULES_FILE} needs it") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise LoadError(f"{path} cannot be read: {error}") from error
