"""The verbs that look at and steer a running daemon: `ps`, `load`, `sleep`, `pin`, `fit`, `keys`, `top`, …"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from inferd.appliance.admin_client import AdminClient
from inferd.appliance.auth.first_key import write_admin_key
from inferd.appliance.auth.keys import KeyStore
from inferd.appliance.auth.principal import Limits
from inferd.appliance.cli_options import HostOption, JsonOption, PortOption
from inferd.appliance.client import Client, NotRunning
from inferd.appliance.downloads.disk import format_bytes
from inferd.appliance.exits import with_exit_codes
from inferd.appliance.keepalive import parse_keep_alive
from inferd.appliance.library.library import Library
from inferd.appliance.schemas import AuditEntry, IncidentRecord, ModelStatus
from inferd.appliance.settings import Settings, load_settings

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="A name or alias, as `inferd ls` shows them.")]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
keys_app = typer.Typer(help="API keys: who may ask, and for how much.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    verbs: dict[str, Callable[..., None]] = {
        "ps": ps,
        "load": load,
        "unload": unload,
        "sleep": sleep,
        "wake": wake,
        "pin": pin,
        "unpin": unpin,
        "fit": fit,
        "usage": usage,
        "audit": audit,
        "incidents": incidents,
        "top": top,
        "console": console,
    }
    for name, verb in verbs.items():
        app.command(name)(with_exit_codes(verb))
    app.command("stop", hidden=True)(with_exit_codes(unload))  # the word that Ollama's users type
    of_keys: dict[str, Callable[..., None]] = {
        "create": create,
        "list": list_keys,
        "revoke": revoke,
        "reset-admin": reset_admin,
    }
    for name, verb in of_keys.items():
        keys_app.command(name)(with_exit_codes(verb))
    app.add_typer(keys_app, name="keys")


def ps(as_json: JsonOption = False, host: HostOption = None, port: PortOption = None) -> None:
    """Every model that is loaded, on its way, asleep or broken."""
    with _client(host, port) as client:
        everything = msgspec.convert(client.admin("GET", "/models"), list[ModelStatus])
    models = [model for model in everything if model.state != "on_disk"]
    if as_json:
        _json(models)
        return
    rows = [
        (
            model.id,
            _state(model),
            format_bytes(model.memory.weights + model.memory.kv),
            f"{model.context_limit:,}",
            f"{model.running}/{model.waiting}",
            f"{100 * model.kv.blocks_used / model.kv.blocks_total:.0f}%" if model.kv.blocks_total else "",
            _until(model),
        )
        for model in models
    ]
    _table(("NAME", "STATE", "MEMORY", "CTX", "RUN/WAIT", "KV", "UNTIL"), rows, "no model is loaded")


def load(model: ModelArgument, host: HostOption = None, port: PortOption = None) -> None:
    """Load a model, or wake it; returns when it answers."""
    _act("POST", f"/load/{model}", host, port)
    typer.echo(f"{model} is ready")


def unload(model: ModelArgument, host: HostOption = None, port: PortOption = None) -> None:
    """Take a model out of memory, once the requests inside it are through."""
    _act("POST", f"/unload/{model}", host, port)
    typer.echo(f"{model} is unloaded")


def sleep(
    model: ModelArgument,
    level: Annotated[int, typer.Option(min=1, max=2, help="1: wakes soon; 2: gives back all of its memory.")] = 1,
    host: HostOption = None,
    port: PortOption = None,
) -> None:
    """Put a model to sleep: it gives its memory back, and wakes with the next request."""
    _act("POST", f"/sleep/{model}", host, port, params={"level": level})
    typer.echo(f"{model} sleeps at level {level}")


def wake(model: ModelArgument, host: HostOption = None, port: PortOption = None) -> None:
    """Wake a model before anybody asks for it."""
    _act("POST", f"/wake/{model}", host, port)
    typer.echo(f"{model} is awake")


def pin(model: ModelArgument, host: HostOption = None, port: PortOption = None) -> None:
    """Keep a model loaded: it is never put to sleep for another one, or for want of requests."""
    _act("PATCH", f"/options/{model}", host, port, json={"pinned": True})
    typer.echo(f"{model} is pinned")


def unpin(model: ModelArgument, host: HostOption = None, port: PortOption = None) -> None:
    """Let a model go to sleep again."""
    _act("PATCH", f"/options/{model}", host, port, json={"pinned": False})
    typer.echo(f"{model} is not pinned any more")


def fit(
    model: ModelArgument,
    context: Annotated[int | None, typer.Option(help="Tokens of one request that must have room.")] = None,
    as_json: JsonOption = False,
    host: HostOption = None,
    port: PortOption = None,
) -> None:
    """Would a model fit now, and who would have to go for it?"""
    params = {} if context is None else {"context": context}
    answer = _act("GET", f"/fit/{model}", host, port, params=params)
    if as_json:
        _json(answer)
    else:
        typer.echo(_fit_text(answer))
    if not answer["fits"]:
        raise typer.Exit(5)


def usage(
    days: Annotated[int, typer.Option(min=1, help="How far back.")] = 30,
    as_json: JsonOption = False,
    host: HostOption = None,
    port: PortOption = None,
) -> None:
    """Tokens by key, model and day."""
    rows = _act("GET", "/usage", host, port, params={"days": days})
    if as_json:
        _json(rows)
        return
    cells = [
        (
            datetime.fromtimestamp(row["day"] * 86400, UTC).date().isoformat(),
            row["key"],
            row["model"],
            *(f"{row[name]:,}" for name in ("requests", "prompt_tokens", "cached_tokens", "output_tokens")),
        )
        for row in rows
    ]
    _table(("DAY", "KEY", "MODEL", "REQUESTS", "PROMPT", "CACHED", "OUTPUT"), cells, "nothing was asked yet")


def audit(
    limit: Annotated[int, typer.Option(min=1)] = 50,
    as_json: JsonOption = False,
    host: HostOption = None,
    port: PortOption = None,
) -> None:
    """What administrators did. Exit code 1 when the log was changed by other means."""
    answer = _act("GET", "/audit", host, port, params={"limit": limit})
    if as_json:
        _json(answer)
    else:
        entries = msgspec.convert(answer["entries"], list[AuditEntry])
        rows = [(_when(entry.at), entry.actor, entry.action, entry.target, entry.detail) for entry in entries]
        _table(("WHEN", "WHO", "WHAT", "ON", "DETAIL"), rows, "nothing yet")
    if answer["first_broken"] is not None:
        typer.echo(f"inferd: the chain is broken at entry {answer['first_broken']}", err=True)
        raise typer.Exit(1)


def incidents(
    limit: Annotated[int, typer.Option(min=1)] = 20,
    as_json: JsonOption = False,
    host: HostOption = None,
    port: PortOption = None,
) -> None:
    """What went wrong, and what helps."""
    found = _act("GET", "/incidents", host, port, params={"limit": limit})
    if as_json:
        _json(found)
        return
    for incident in msgspec.convert(found, list[IncidentRecord]):
        typer.echo(f"{_when(incident.at)}  {incident.model}  {incident.kind.replace('_', ' ')}: {incident.summary}")
        typer.echo(f"    {incident.remedy}")
        for line in incident.last_lines[-5:]:
            typer.echo(f"    | {line}")
    if not found:
        typer.echo("nothing went wrong")


def top(
    read_only: Annotated[bool, typer.Option("--readonly", help="Look, and change nothing.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Print what there is now, as JSON, and end.")] = False,
    plain: Annotated[bool, typer.Option("--ascii", help="For terminals that have ASCII alone.")] = False,
    host: HostOption = None,
    port: PortOption = None,
) -> None:
    """The dashboard: models, requests and why each waits, in this terminal."""
    settings = _settings(host, port)
    _check_running(settings)
    if once:
        with Client(settings.address, settings.admin_socket) as client:
            _json({name: client.admin("GET", f"/{name}") for name in ("models", "requests")})
        return
    from inferd.tui.app import Top  # here, because only this verb draws

    watcher = AdminClient(settings.address, socket=_socket(settings))
    Top(watcher, read_only=read_only, plain=plain).run()


def console(host: HostOption = None, port: PortOption = None) -> None:
    """A link that opens the web console once, within two minutes."""
    settings = _settings(host, port)
    answer = _act("POST", "/console-link", host, port)
    typer.echo(f"{settings.address}/console  — log in with this instead of a key: {answer['token']}")


def create(
    name: Annotated[str, typer.Argument(help="Whose key it is: a person, a program.")],
    scope: Annotated[list[str] | None, typer.Option(help="infer, metrics, read or admin; may be given again.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="Only these models; may be given again.")] = None,
    batch: Annotated[bool, typer.Option("--batch", help="Its requests wait for interactive ones.")] = False,
    requests_per_minute: Annotated[int | None, typer.Option(min=1)] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(min=1)] = None,
    tokens_per_day: Annotated[int | None, typer.Option(min=1)] = None,
    max_running: Annotated[int | None, typer.Option(min=1, help="Requests at once.")] = None,
    expires: Annotated[str | None, typer.Option(help='A duration, as in "30d".')] = None,
    as_json: JsonOption = False,
    host: HostOption = None,
    port: PortOption = None,
) -> None:
    """Make a key. It is printed once, and never again."""
    limits = Limits(requests_per_minute, tokens_per_minute, tokens_per_day, max_running)
    body = {
        "name": name,
        "scopes": scope or ["infer"],
        "models": model or None,
        "lane": "batch" if batch else "interactive",
        "limits": msgspec.to_builtins(limits),
        "expires_at": _expiry(expires),
    }
    made = _act("POST", "/keys", host, port, json=body)
    if as_json:
        _json(made)
    else:
        typer.echo(made["key"])
        typer.echo("Keep it: only its digest is stored, nobody can read it again.", err=True)


def list_keys(as_json: JsonOption = False, host: HostOption = None, port: PortOption = None) -> None:
    """Every key, without its secret."""
    found = _act("GET", "/keys", host, port)
    if as_json:
        _json(found)
        return
    rows = [
        (
            key["name"],
            key["id"],
            ", ".join(key["scopes"]),
            ", ".join(key["models"] or ["all"]),
            key["lane"],
            "revoked" if key["revoked_at"] else "valid",
        )
        for key in found
    ]
    _table(("NAME", "ID", "SCOPES", "MODELS", "LANE", "STATE"), rows, "no keys yet")


def revoke(
    name: Annotated[str, typer.Argument(help="Its name or id.")],
    yes: YesOption = False,
    host: HostOption = None,
    port: PortOption = None,
) -> None:
    """Refuse a key from now on."""
    if not yes and sys.stdin.isatty():
        typer.confirm(f"Revoke the key {name}? Whoever uses it is refused at once", abort=True)
    _act("DELETE", f"/keys/{name}", host, port)
    typer.echo(f"{name} is revoked")


def reset_admin(host: HostOption = None, port: PortOption = None) -> None:
    """Make a new admin key in the place of the old one. The daemon must not run: it knows the keys by heart."""
    settings = _settings(host, port)
    if _socket(settings) is not None:
        typer.echo("inferd: a daemon runs; make a key with `inferd keys create NAME --scope admin`", err=True)
        raise typer.Exit(5)
    with Library.open(settings.home) as library:
        typer.echo(write_admin_key(KeyStore(library.database), settings.home))


def _settings(host: str | None, port: int | None) -> Settings:
    return load_settings({"host": host, "port": port})


def _client(host: str | None, port: int | None) -> Client:
    settings = _settings(host, port)
    _check_running(settings)
    return Client(settings.address, settings.admin_socket)


def _check_running(settings: Settings) -> None:
    if _socket(settings) is None:
        raise NotRunning(f"no daemon of this user listens at {settings.address}; start it with `inferd serve`")


def _socket(settings: Settings) -> Any:
    return settings.admin_socket if settings.admin_socket.exists() else None


def _act(method: str, path: str, host: str | None, port: int | None, **options: Any) -> Any:
    with _client(host, port) as client:
        return client.admin(method, path, **options)


def _json(value: Any) -> None:
    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]], empty: str) -> None:
    """As wide as it needs to be where nobody looks."""
    table = Table(*titles, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    if not table.row_count:
        typer.echo(empty, err=True)
        return
    console = Console()
    if not console.is_terminal:
        console.width = 400
    console.print(table)


def _state(model: ModelStatus) -> str:
    progress = f" {100 * model.progress:.0f}%" if model.progress is not None else ""
    return model.state.replace("_", " ") + progress


def _until(model: ModelStatus) -> str:
    if model.state == "failed":
        return f"next try in {max((model.retry_at or 0) - time.time(), 0):.0f} s"
    if model.pinned or (model.state == "ready" and model.keep_alive_s is None):
        return "for ever"
    if model.expires_at is None:
        return "in use" if model.running else ""
    return f"{max(model.expires_at - time.time(), 0) / 60:.0f} minutes from now"


def _fit_text(answer: dict[str, Any]) -> str:
    parts = ", ".join(f"{name} {format_bytes(answer[name])}" for name in ("weights", "kv", "workspace"))
    lines = [f"{answer['model']} needs {format_bytes(answer['total'])}: {parts}"]
    if answer["is_loaded"]:
        lines.append("it is loaded")
    elif not answer["fits"]:
        lines.append(f"it does not fit: {answer['why_not']}")
    elif answer["waits_for"]:
        lines.append(f"it fits once these are through: {', '.join(answer['waits_for'])}")
    elif answer["evicts"]:
        lines.append(f"it fits; these make room: {', '.join(answer['evicts'])}")
    else:
        lines.append("it fits")
    lines.append(f"the longest context that fits: {answer['longest_context']:,} tokens")
    return "\n".join(lines)


def _when(at: float) -> str:
    return datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M:%S")


def _expiry(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        seconds = parse_keep_alive(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return None if seconds is None else time.time() + seconds
