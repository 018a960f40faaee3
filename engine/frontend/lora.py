"""How a caller names an adapter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inferd.engine.errors import InvalidRequest


@dataclass(frozen=True)
class LoRARequest:
    """The adapter that a request is answered with.

    With a path it is loaded first, unless it is there from that folder already; without one `add_lora` has loaded it.
    """

    lora_name: str
    lora_path: str | None = None


def adapters_for(
    given: LoRARequest | Sequence[LoRARequest | None] | None, num_prompts: int
) -> list[LoRARequest | None]:
    """One a prompt. Raises `InvalidRequest` for another number of them."""
    if given is None or isinstance(given, LoRARequest):
        return [given] * num_prompts
    if len(given) != num_prompts:
        raise InvalidRequest(f"{num_prompts} prompts but {len(given)} adapters", param="lora_request")
    return list(given)
