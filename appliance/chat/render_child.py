"""The process that renders one model's chat template: `python -P -m inferd.appliance.chat.render_child`.

Jinja's sandbox keeps a template from Python's objects, but a single operation inside it (a string doubled forty times,
two structures that hold themselves many times over compared) can still take all memory or never return. So it happens
here, where the kernel has the last word. It ends with its standard input.
"""

from __future__ import annotations

import os
import resource
import signal
from typing import IO, Any

import jinja2
import msgspec

from inferd.appliance.chat.template import MAX_RENDER_S, ChatTemplate, TemplateRefused

EXTRA_MEMORY_BYTES = 256 << 20  # beyond what this process has before it sees the template
SIZE_BYTES = 4  # of the length before each message


class Render(msgspec.Struct):
    """One rendering that is asked for. The first message to the process is the template's source instead."""

    messages: list[dict[str, Any]]
    variables: dict[str, Any]


class Rendered(msgspec.Struct, omit_defaults=True):
    """Exactly one field is set. `invalid_line`: the template is no jinja from that line on."""

    text: str | None = None
    refused: str | None = None
    invalid_line: int | None = None


def write_message(stream: IO[bytes], data: bytes) -> None:
    stream.write(len(data).to_bytes(SIZE_BYTES, "big") + data)
    stream.flush()


def main() -> None:
    requests, answers = os.fdopen(0, "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed by mistake is no answer
    source = msgspec.msgpack.decode(_read_message(requests), type=str)
    _confine()
    template: ChatTemplate | None = None
    while data := _read_message(requests):
        request = msgspec.msgpack.decode(data, type=Render)
        signal.setitimer(signal.ITIMER_PROF, MAX_RENDER_S)  # its signal ends the process
        try:
            template = template or ChatTemplate(source)
            answer = Rendered(text=template.render(request.messages, request.variables))
        except TemplateRefused as refused:
            answer = Rendered(refused=refused.cause)
        except jinja2.TemplateSyntaxError as error:
            answer = Rendered(invalid_line=error.lineno)
        except MemoryError:
            answer = Rendered(refused="it needs too much memory")
        except RecursionError:
            answer = Rendered(refused="it is nested too deeply")
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_message(answers, msgspec.msgpack.encode(answer))


def _read_message(stream: IO[bytes]) -> bytes:
    """Empty at the end of the stream."""
    return stream.read(int.from_bytes(stream.read(SIZE_BYTES), "big"))


def _confine() -> None:
    with open("/proc/self/statm", encoding="ascii") as statm:
        num_pages = int(statm.read().split()[0])
    limits = {
        resource.RLIMIT_AS: num_pages * resource.getpagesize() + EXTRA_MEMORY_BYTES,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 16,
    }
    for limit, value in limits.items():
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))


if __name__ == "__main__":
    main()
