"""One prompt, one checked answer: requests to an OpenAI-compatible server, repeated while that may help.

A prompt is sent as its own token ids, so the server reads exactly what we rendered, whatever its chat template. Its
answer counts only if it is whole and if what the server says of the prompt fits. Three kinds of failure, no more:
the prompt is refused (`PromptRefused`), no attempt succeeded (`GaveUp`), or no prompt can succeed (`ServerUnusable`).
"""

from __future__ import annotations

import asyncio
import email.utils
import hashlib
import logging
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast, get_args

import httpx

from draftmill.target.answers import Answer, Finish, Prompt, Sampling

log = logging.getLogger(__name__)
T = TypeVar("T")

LONGEST_PAUSE_S = 600.0  # a Retry-After beyond it is cut to it
_AGAIN = frozenset({408, 409, 425, 429})  # and 5xx
_HOPELESS = {
    401: "set OPENAI_API_KEY, or give --api-key",
    403: "set OPENAI_API_KEY, or give --api-key",
    404: "give --server as http://HOST:PORT/v1, and --model as the server names it",
    405: "give --server as http://HOST:PORT/v1",
}


class PromptRefused(Exception):
    """The server will not answer this prompt."""


class GaveUp(Exception):
    """Every attempt failed."""


class ServerUnusable(ValueError):
    """Nothing will come of this server as it is set up; the message says what to change."""


class _Again(Exception):
    """One attempt failed. `kind` is what it is counted under, `pause_s` what the server asked for."""

    def __init__(self, kind: str, detail: str = "", pause_s: float | None = None) -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind, self.pause_s = kind, pause_s


@dataclass(frozen=True, slots=True)
class Retry:
    """Waits double from attempt to attempt, shortened at random by up to half, so that workers do not return as one."""

    attempts: int = 6
    first_wait_s: float = 1.0
    longest_wait_s: float = 30.0
    timeout_s: float = 600.0  # of one attempt, its whole reply included

    def wait_s(self, attempt: int) -> float:
        """After attempt 1, 2, ..."""
        return random.uniform(0.5, 1.0) * min(self.longest_wait_s, self.first_wait_s * 2.0 ** (attempt - 1))


@dataclass(slots=True)
class Completions:
    """A connection's requests. `model` is the name the server knows the target by."""

    http: httpx.AsyncClient
    tokenizer: Any
    stop_ids: frozenset[int]
    retry: Retry
    model: str = ""
    failed_attempts: Counter[str] = field(default_factory=Counter)  # kind -> attempts
    _paused_until: float = 0.0  # of time.monotonic(): the server asked all of us to wait

    async def models(self) -> list[dict[str, Any]]:
        """The entries of /models, each with its `id`."""
        data = await self._repeat(lambda: self._send("GET", "models", None))
        entries = data.get("data")
        if not isinstance(entries, list) or not all(isinstance(entry, dict) and "id" in entry for entry in entries):
            raise ServerUnusable(f"{self.http.base_url}models is no list of models: {_HOPELESS[404]}")
        return entries

    async def complete(self, prompt: Prompt, sampling: Sampling) -> Answer:
        body = {
            "model": self.model,
            "prompt": prompt.token_ids,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            # Servers fill what is not said from the model's generation_config.json.
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": sorted(self.stop_ids),
            "skip_special_tokens": False,
            "return_token_ids": True,
        }
        if sampling.temperature > 0:
            body["seed"] = seed_of(sampling, prompt.key)

        async def attempt() -> Answer:
            return read_answer(await self._send("POST", "completions", body), prompt, self.tokenizer, self.stop_ids)

        return await self._repeat(attempt)

    async def chat_prompt_ids(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> Any:
        """What the server itself renders of `messages`: token ids, or None where it does not tell."""
        body = {
            "model": self.model,
            "messages": messages,
            "chat_template_kwargs": options,
            "max_tokens": 1,
            "temperature": 0.0,
            "return_token_ids": True,
        }
        try:
            data = await self._repeat(lambda: self._send("POST", "chat/completions", body))
        except (PromptRefused, ServerUnusable, GaveUp):
            return None
        return _told_prompt_ids(data)

    async def _repeat(self, attempt: Callable[[], Awaitable[T]]) -> T:
        for number in range(1, self.retry.attempts + 1):
            await asyncio.sleep(max(0.0, self._paused_until - time.monotonic()))
            try:
                return await attempt()
            except _Again as failure:
                if not self.failed_attempts[failure.kind]:
                    log.warning("server: %s (attempt %d of %d)", failure, number, self.retry.attempts)
                self.failed_attempts[failure.kind] += 1
                if failure.pause_s is not None:
                    self._paused_until = max(self._paused_until, time.monotonic() + failure.pause_s)
                last = failure
            if number < self.retry.attempts:
                await asyncio.sleep(self.retry.wait_s(number))
        raise GaveUp(f"{self.retry.attempts} attempts, the last: {last}") from None

    async def _send(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        """The JSON object of a good reply."""
        try:
            async with asyncio.timeout(self.retry.timeout_s):
                reply = await self.http.request(method, path, json=body)
        except (TimeoutError, httpx.TimeoutException):
            raise _Again("timeout") from None
        except httpx.RequestError as error:
            raise _Again("connection", f"{type(error).__name__}: {error}") from None
        if reply.status_code != 200:
            raise _failure(reply)
        try:
            data = reply.json()
        except ValueError:
            data = None
        if not isinstance(data, dict):
            raise _Again("broken reply", f"no JSON object: {reply.text[:80]!r}")
        return data


def seed_of(sampling: Sampling, key: str) -> int:
    """31 bits, of (seed, key) alone."""
    return int.from_bytes(hashlib.sha256(f"{sampling.seed}/{key}".encode()).digest()[:4], "little") >> 1


def read_answer(data: Mapping[str, Any], prompt: Prompt, tokenizer: Any, stop_ids: frozenset[int]) -> Answer:
    """Raises _Again where the reply is not a whole answer, ServerUnusable where it is one to another prompt."""
    choices = data.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict) or not isinstance(choice.get("text"), str):
        raise _Again("broken reply", "no choice with a text")
    _check_prompt(data, prompt)
    reason = choice.get("finish_reason")
    if reason not in get_args(Finish):
        raise _Again("broken reply", f"finish_reason {reason!r}")
    finish = cast(Finish, reason)
    usage = data.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    ids = choice.get("token_ids")
    if ids is not None:
        ids = _checked_ids(ids, tokenizer)
        stopped_by = choice.get("stop_reason", choice.get("matched_stop"))
        if finish == "stop" and isinstance(stopped_by, int) and stopped_by in stop_ids and stop_ids.isdisjoint(ids):
            ids.append(stopped_by)  # some servers take it away with the text
        if (finish == "length" and ids) or not stop_ids.isdisjoint(ids):
            return Answer.from_ids(ids, tokenizer, stop_ids)
    try:
        choice["text"].encode()
    except UnicodeEncodeError:
        raise _Again("broken reply", "a text with half a character") from None
    return Answer(None, choice["text"], finish, tokens if isinstance(tokens, int) else 0)


def _checked_ids(ids: Any, tokenizer: Any) -> list[int]:
    if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
        raise _Again("broken reply", "token_ids is no list of token ids")
    if ids and max(ids) >= len(tokenizer):
        raise ServerUnusable(
            f"the server answers with token {max(ids)}, the target's tokenizer has {len(tokenizer)}: it serves another "
            "model; give --target and --server the same one"
        )
    return list(ids)


def _check_prompt(data: Mapping[str, Any], prompt: Prompt) -> None:
    told = _told_prompt_ids(data)
    usage = data.get("usage")
    count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    if told is not None and told != prompt.token_ids:
        how = difference(prompt.token_ids, told)
    elif isinstance(count, int) and count != len(prompt.token_ids):
        how = f"{len(prompt.token_ids)} tokens here, {count} there"
    else:
        return
    raise ServerUnusable(
        f"{prompt.key}: the server read other prompt tokens than it was sent ({how}): it must not add or cut tokens of "
        "a tokenised prompt; change its settings, or use another server"
    )


def _told_prompt_ids(data: Mapping[str, Any]) -> Any:
    """vLLM tells them beside the choices of a chat and within those of a completion, SGLang within both."""
    choices = data.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    told = choice.get("prompt_token_ids")
    return data.get("prompt_token_ids") if told is None else told


def difference(ours: Sequence[int], theirs: Any) -> str:
    """Where two lists of token ids part, in words."""
    if not isinstance(theirs, list):
        return f"it tells {theirs!r:.40}"
    shared = min(len(ours), len(theirs))
    at = next((index for index in range(shared) if ours[index] != theirs[index]), shared)
    here, there = ours[at : at + 4], theirs[at : at + 4]
    return f"{len(ours)} tokens here, {len(theirs)} there; from token {at} on {here} and {there}"


def _failure(reply: httpx.Response) -> Exception:
    status = reply.status_code
    detail = f"HTTP {status}: {reply.text[:300].strip()}"
    if status in _AGAIN or status >= 500:
        return _Again(f"HTTP {status}", reply.text[:80].strip(), _retry_after_s(reply.headers.get("retry-after")))
    if status in _HOPELESS or status < 400:
        return ServerUnusable(f"{reply.request.url}: {detail}: {_HOPELESS.get(status, _HOPELESS[404])}")
    return PromptRefused(detail)


def _retry_after_s(value: str | None) -> float | None:
    """Seconds, or an HTTP date."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
            return None
    return min(max(seconds, 0.0), LONGEST_PAUSE_S) if seconds == seconds else None
