"""What the routes to models that pool do alike: several texts through the engine at once, usage, blame."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from inferd.appliance.api.openai.generation import last_outputs, merge, warning_headers
from inferd.appliance.api.openai.pooling_schemas import PoolingUsage
from inferd.appliance.requests.live import LiveRequest
from inferd.appliance.supervisor.served import ServedModel
from inferd.engine.errors import InvalidRequest
from inferd.engine.pooling.inputs import PoolingPrompt
from inferd.engine.pooling.outputs import PoolingOutput
from inferd.engine.pooling.params import PoolingParams

MAX_TEXTS = 2048  # of one request


@dataclass(frozen=True)
class Pooled:
    """The results of several texts, in their order."""

    outputs: list[PoolingOutput]
    headers: dict[str, str]

    @property
    def usage(self) -> PoolingUsage:
        num_tokens = sum(len(output.prompt_token_ids) for output in self.outputs)
        return PoolingUsage(num_tokens, num_tokens)


async def pool(
    served: ServedModel, live: LiveRequest, prompts: Sequence[PoolingPrompt], params: PoolingParams, request_id: str
) -> Pooled:
    """All of them side by side; the first error ends the others. Raises what `ServedModel.begin`'s streams raise."""
    prepared = await served.prepare_pooling(prompts, params, request_id=request_id, live=live)
    outputs = await last_outputs(merge(served.begin(live, prepared)), len(prepared))
    return Pooled([PoolingOutput.of(output) for output in outputs], warning_headers(prepared))


def check_count(name: str, count: int) -> None:
    """Raises `InvalidRequest`."""
    if not 1 <= count <= MAX_TEXTS:
        raise InvalidRequest(f"{name} must have between 1 and {MAX_TEXTS} entries, got {count}", param=name)


@contextmanager
def blamed_on(field: str) -> Iterator[None]:
    """What the engine calls a prompt, or the texts that it gets, is called so in this request."""
    try:
        yield
    except InvalidRequest as error:
        if error.param in ("prompt", "input", "texts"):
            error.param = field
        raise
