"""From a message that asks for a request to the request, or to what is wrong with it."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence

from inferd.engine.config import EngineConfig
from inferd.engine.core.grammar import GrammarManager
from inferd.engine.core.kv.hashing import make_block_hasher
from inferd.engine.core.lora import LoraManager, refuse_loras
from inferd.engine.errors import ContextLengthExceeded, InvalidRequest, NotSupported
from inferd.engine.lora.adapter import Adapter
from inferd.engine.messages import LANES, AddRequest
from inferd.engine.params import SamplingParams, token_ids_in
from inferd.engine.pooling.checks import check_pooling
from inferd.engine.request import Request

ParamsCheck = Callable[[SamplingParams], None]


class Intake:
    """Checks and hashes requests. Touches nothing of the scheduler, so the thread that reads the socket may use it.

    `hash_seed` names what cached blocks are hashed with; without one it is drawn, so that hashes of two engines never
    agree. `params_checks` raise `InvalidRequest` for what logits processors that are not built in cannot serve.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        hash_seed: bytes = b"",
        grammar: GrammarManager | None = None,
        params_checks: Sequence[ParamsCheck] = (),
        lora: LoraManager | None = None,
    ) -> None:
        self._config = config
        self._grammar = grammar
        self._params_checks = params_checks
        self._lora = lora
        caching = config.cache.enable_prefix_caching
        self._block_hasher = (
            make_block_hasher(config.cache.hash_block_size, hash_seed or os.urandom(32)) if caching else None
        )
        self._seeds = random.Random(config.seed)

    def make_request(self, add: AddRequest) -> Request:
        """Raises `InvalidRequest`, which concerns this request alone. `max_tokens` is cut to the room the context
        leaves.
        """
        self._check(add)
        room = self._config.scheduler.max_model_len - len(add.prompt_token_ids)
        params = add.params
        return Request(
            add,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            max_tokens=max(1, room if params.max_tokens is None else min(params.max_tokens, room)),
            block_hasher=self._block_hasher,
            lora=self._adapter(add.lora),
        )

    def _adapter(self, name: str | None) -> Adapter | None:
        if name is None:
            return None
        if self._lora is None:
            refuse_loras()
        return self._lora.find(name)

    def _check(self, add: AddRequest) -> None:
        prompt, max_model_len = add.prompt_token_ids, self._config.scheduler.max_model_len
        if not prompt:
            raise InvalidRequest("the prompt is empty; it needs at least one token", param="prompt")
        check_pooling(add, self._config)
        num_answer_tokens = 0 if add.pooling is not None else 1
        if len(prompt) + num_answer_tokens > max_model_len:
            raise ContextLengthExceeded(len(prompt), max_model_len, num_answer_tokens=num_answer_tokens)
        if add.features:
            raise NotSupported("multimodal inputs are not supported; send text only", param="features")
        if add.priority != 0 and self._config.scheduler.policy == "fcfs":
            raise NotSupported(
                "scheduling_policy=fcfs has no priorities; leave priority at 0, or choose priority or fair",
                param="priority",
            )
        if add.lane not in LANES:
            raise InvalidRequest(f"unknown lane {add.lane!r}; there are: {', '.join(LANES)}", param="lane")
        self._check_vocabulary("prompt", prompt)
        for param, token_ids in token_ids_in(add.params):
            self._check_vocabulary(param, token_ids)
        if add.params.n != 1:
            raise InvalidRequest("several answers are several requests to the engine; n is split before", param="n")
        for check in self._params_checks:
            check(add.params)
        if self._grammar is not None:
            self._grammar.check(add.params)
        elif add.params.structured_output is not None:
            raise NotSupported("this engine has no grammars; leave structured_output out", param="structured_output")

    def _check_vocabulary(self, param: str, token_ids: list[int]) -> None:
        vocab_size = self._config.model.vocab_size
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
            raise InvalidRequest(
                f"token id {wrong} in {param} is outside the vocabulary; ids run from 0 to {vocab_size - 1}",
                param=param,
            )
