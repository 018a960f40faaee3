"""How much a key may ask for: pure arithmetic over a clock that is given."""

from __future__ import annotations

from dataclasses import dataclass

from inferd.appliance.auth.principal import Limits, Principal

MINUTE_S = 60.0


class LimitReached(Exception):
    """`retry_after_s`: when there is room again, computed from what is in use now."""

    def __init__(self, text: str, retry_after_s: float) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


@dataclass
class Bucket:
    """Fills up to `size` at `size` a minute. May go below zero: what an answer takes is known when it is there."""

    size: float
    level: float
    at: float

    def settle(self, now: float) -> None:
        self.level = min(self.size, self.level + (now - self.at) * self.size / MINUTE_S)
        self.at = now

    def wait_s(self, amount: float, now: float) -> float:
        """Until `amount` may be taken; 0: now."""
        self.settle(now)
        return max(min(amount, self.size) - self.level, 0.0) * MINUTE_S / self.size


class Limiter:
    """One for all keys. `begin` and `end` come in pairs; tokens are taken once they are known."""

    def __init__(self) -> None:
        self._running: dict[str, int] = {}
        self._requests: dict[str, Bucket] = {}
        self._tokens: dict[str, Bucket] = {}

    def running(self, key: str) -> int:
        return self._running.get(key, 0)

    def begin(self, who: Principal, now: float, *, tokens_today: int = 0, seconds_of_day_left: float = 0.0) -> None:
        """Raises `LimitReached`, and has then taken nothing."""
        key, limits = who.key_id or who.name, who.limits
        if limits.max_running is not None and self.running(key) >= limits.max_running:
            raise LimitReached(f"key {who.name} runs {self.running(key)} of {limits.max_running} requests", 1.0)
        if limits.tokens_per_day is not None and tokens_today >= limits.tokens_per_day:
            text = f"key {who.name} has used its {limits.tokens_per_day} tokens of today"
            raise LimitReached(text, max(seconds_of_day_left, 1.0))
        requests = self._bucket(self._requests, key, limits.requests_per_minute, now)
        tokens = self._bucket(self._tokens, key, limits.tokens_per_minute, now)
        if requests is not None and (wait_s := requests.wait_s(1, now)) > 0:
            raise LimitReached(f"key {who.name} may ask {limits.requests_per_minute} times a minute", wait_s)
        if tokens is not None and (wait_s := tokens.wait_s(1, now)) > 0:
            raise LimitReached(f"key {who.name} may use {limits.tokens_per_minute} tokens a minute", wait_s)
        if requests is not None:
            requests.level -= 1
        self._running[key] = self.running(key) + 1

    def end(self, who: Principal, num_tokens: int, now: float) -> None:
        key = who.key_id or who.name
        self._running[key] -= 1
        if not self._running[key]:
            del self._running[key]
        if (tokens := self._bucket(self._tokens, key, who.limits.tokens_per_minute, now)) is not None:
            tokens.settle(now)
            tokens.level -= num_tokens

    def headers(self, who: Principal, now: float) -> dict[str, str]:
        """What is left, in the headers that OpenAI's clients read."""
        key, limits = who.key_id or who.name, who.limits
        found: dict[str, str] = {}
        for kind, limit, buckets in _kinds(limits, self._requests, self._tokens):
            if (bucket := self._bucket(buckets, key, limit, now)) is not None:
                bucket.settle(now)
                found[f"x-ratelimit-limit-{kind}"] = str(limit)
                found[f"x-ratelimit-remaining-{kind}"] = str(max(int(bucket.level), 0))
        return found

    def _bucket(self, buckets: dict[str, Bucket], key: str, size: int | None, now: float) -> Bucket | None:
        if size is None:
            buckets.pop(key, None)
            return None
        bucket = buckets.get(key)
        if bucket is None or bucket.size != size:
            bucket = buckets[key] = Bucket(size, size, now)
        return bucket


def _kinds(
    limits: Limits, requests: dict[str, Bucket], tokens: dict[str, Bucket]
) -> list[tuple[str, int | None, dict[str, Bucket]]]:
    return [("requests", limits.requests_per_minute, requests), ("tokens", limits.tokens_per_minute, tokens)]
