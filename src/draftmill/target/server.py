"""`Server`: an OpenAI-compatible server (vLLM, SGLang) that holds the target answers prompts.

    prompts -> `concurrency` workers, one request each -> answers, appended in the order they come

A worker waits for its own request only, and takes the next prompt once that has ended. The breaker sees every end; when
it opens, requests under way are dropped and what was answered stays. A prompt without an answer is tried again by the
next call, so the same command goes on later.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from draftmill.target.answers import Answer, OnAnswers, OnProgress, OnRefusal, Prompt, Sampling
from draftmill.target.completions import Completions, GaveUp, PromptRefused, Retry, ServerUnusable, difference
from draftmill.target.loading import identity, load_tokenizer, stop_ids

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
LOOPBACK = ("localhost", "127.0.0.1", "::1")  # never by way of the environment's proxy
DOWN_AFTER = 3  # prompts given up in a row, each after all its attempts, while no other was answered
SHARE_FROM = 20  # prompts ended before the share of failed ones says anything
TEMPLATE_PROBE = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! How can I help?"},
    {"role": "user", "content": "What can you do?"},
]


@dataclass(frozen=True, slots=True)
class ServerSettings:
    url: str  # up to and with /v1
    model: str | None = None  # None: the only one served
    concurrency: int = 32  # requests at a time
    retry: Retry = field(default_factory=Retry)
    max_failed_share: float = 0.1  # of the prompts that ended in this call
    api_key: str | None = None

    def __post_init__(self) -> None:
        try:
            url = httpx.URL(self.url)
            fault = "" if url.scheme in ("http", "https") and url.host else "it is no http address"
        except httpx.InvalidURL as error:
            fault = str(error)
        if fault:
            raise ValueError(f"server is {self.url} ({fault}): write it as http://HOST:PORT/v1")
        if self.api_key and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ValueError("api_key has characters that no HTTP header carries, perhaps a line end: give it anew")
        if self.concurrency < 1:
            raise ValueError(f"concurrency is {self.concurrency}: use at least 1")
        if self.retry.attempts < 1:
            raise ValueError(f"attempts is {self.retry.attempts}: use at least 1")
        if not self.retry.timeout_s > 0:
            raise ValueError(f"timeout is {self.retry.timeout_s} s: use more than 0")
        if not 0 <= self.max_failed_share <= 1:
            raise ValueError(f"max_failed_share is {self.max_failed_share}: use a share from 0 to 1")


@dataclass(slots=True)
class Breaker:
    """Opens when the server is down, or fails too many prompts to be worth going on."""

    max_failed_share: float
    answered: int = 0
    refused: int = 0
    given_up: int = 0
    in_a_row: int = 0  # given up since the last reply of any kind

    def note(self, end: Answer | PromptRefused | GaveUp) -> None:
        if isinstance(end, GaveUp):
            self.given_up += 1
            self.in_a_row += 1
            return
        self.in_a_row = 0
        if isinstance(end, PromptRefused):
            self.refused += 1
        else:
            self.answered += 1

    @property
    def open_because(self) -> str | None:
        if self.in_a_row >= DOWN_AFTER:
            return f"the server answers no more: {self.in_a_row} prompts in a row were given up"
        ended = self.answered + self.refused + self.given_up
        failed = self.refused + self.given_up
        if ended >= SHARE_FROM and failed > self.max_failed_share * ended:
            return (
                f"{failed} of {ended} prompts failed, more than max_failed_share {self.max_failed_share:g}: "
                f"{self.given_up} given up, {self.refused} refused by the server"
            )
        return None


class _Stop(Exception):
    """The breaker opened; the message says why."""


class Server:
    """An `Answerer`. See there for what its methods promise. Use `Server.connect`."""

    plans_with_answered = False

    def __init__(self, settings: ServerSettings, target: Path, model: str, model_length: int | None) -> None:
        from transformers import AutoConfig

        self.settings, self.target, self.model = settings, target, model
        self.tokenizer = load_tokenizer(target)
        self.stop_ids = stop_ids(target, self.tokenizer)
        config = AutoConfig.from_pretrained(str(target), local_files_only=True).get_text_config(decoder=True)
        limits = [getattr(config, "max_position_embeddings", None), model_length]
        self.context_length: int | None = min((limit for limit in limits if limit is not None), default=None)
        self.failed_attempts: Counter[str] = Counter()  # kind -> attempts, of all calls

    @classmethod
    def connect(
        cls, settings: ServerSettings, target: Path, template_options: Mapping[str, Any] | None = None
    ) -> Server:
        """`target`: the folder of the model that the server holds; of its weights only the hash is taken.

        Raises ValueError where the server cannot be reached or does not serve the model, and where it tells that its
        chat template would render a conversation otherwise: drafters see in serving what the server renders.
        """

        async def ask() -> Server:
            async with _open(settings) as http:
                first = Completions(http, None, frozenset(), replace(settings.retry, attempts=2))
                try:
                    served = await first.models()
                except GaveUp as error:
                    raise ValueError(f"server {settings.url} cannot be reached ({error}): is it running?") from None
                server = cls(settings, target, *_chosen_model(settings, served))
                first.model = server.model
                await server._check_chat_template(first, dict(template_options or {}))
                return server

        return asyncio.run(ask())

    def made_by(self) -> dict[str, Any]:
        files = identity(self.target, "")
        return {
            "server_model": self.model,
            "target": {key: value for key, value in files.items() if key not in ("name", "dtype")},
        }

    async def _check_chat_template(self, completions: Completions, options: dict[str, Any]) -> None:
        ours = self.tokenizer.apply_chat_template(TEMPLATE_PROBE, add_generation_prompt=True, **options)["input_ids"]
        told = await completions.chat_prompt_ids(TEMPLATE_PROBE, options)
        if told is None:
            log.warning("server: it does not tell how it renders a chat, so its chat template was not checked")
        elif told != ours:
            raise ServerUnusable(
                f"the server's chat template differs from the target's ({difference(ours, told)}): start the server "
                f"with the template of {self.target}, or give the --template-option that it uses"
            )

    def answer(
        self,
        prompts: Iterable[Prompt],
        sampling: Sampling,
        on_answers: OnAnswers,
        on_refusal: OnRefusal,
        on_progress: OnProgress | None = None,
    ) -> str | None:
        return asyncio.run(self._answer(iter(prompts), sampling, on_answers, on_refusal, on_progress))

    async def _answer(
        self,
        prompts: Iterator[Prompt],
        sampling: Sampling,
        on_answers: OnAnswers,
        on_refusal: OnRefusal,
        on_progress: OnProgress | None,
    ) -> str | None:
        async with _open(self.settings) as http:
            call = _Call(
                self._completions(http),
                prompts,
                sampling,
                Breaker(self.settings.max_failed_share),
                on_answers,
                on_refusal,
                on_progress or (lambda _ended, _tokens: None),
            )
            return await call.run(self.settings.concurrency)

    def _completions(self, http: httpx.AsyncClient) -> Completions:
        return Completions(
            http, self.tokenizer, self.stop_ids, self.settings.retry, self.model, failed_attempts=self.failed_attempts
        )


@dataclass(slots=True)
class _Call:
    """One run over prompts: its workers share the iterator, so each prompt has one owner."""

    completions: Completions
    prompts: Iterator[Prompt]
    sampling: Sampling
    breaker: Breaker
    on_answers: OnAnswers
    on_refusal: OnRefusal
    on_progress: OnProgress
    ready: list[tuple[Prompt, Answer]] = field(default_factory=list)  # answered, not yet handed on
    tokens: int = 0

    async def run(self, workers: int) -> str | None:
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(workers):
                    group.create_task(self.work())
        except BaseExceptionGroup as failed:
            stop = next((error for error in failed.exceptions if not isinstance(error, _Stop)), failed.exceptions[0])
            if isinstance(stop, OSError):
                self.ready.clear()  # the file's last line may be cut: nothing may follow it
            if not isinstance(stop, _Stop):
                raise stop from None
            return str(stop)
        finally:
            self.hand_on()
        given_up = self.breaker.given_up
        return f"{given_up} prompts were given up" if given_up else None

    async def work(self) -> None:
        for prompt in self.prompts:
            end: Answer | PromptRefused | GaveUp
            try:
                end = await self.completions.complete(prompt, self.sampling)
                self.ready.append((prompt, end))
                await asyncio.sleep(0)  # others that are ready too are written with this one
                self.hand_on()
            except PromptRefused as error:
                end = error
                self.on_refusal(prompt, "refused_by_server", str(error))
            except GaveUp as error:
                end = error
                log.warning("%s is left for later: %s", prompt.key, error)
            self.on_progress(0, self.tokens)
            self.breaker.note(end)
            if (reason := self.breaker.open_because) is not None:
                raise _Stop(reason)

    def hand_on(self) -> None:
        if not self.ready:
            return
        answered, self.ready = self.ready, []  # before the call: one that fails is not repeated
        self.on_answers(answered)
        self.tokens += sum(answer.tokens for _, answer in answered)
        self.on_progress(0, self.tokens)


@asynccontextmanager
async def _open(settings: ServerSettings) -> Any:
    async with httpx.AsyncClient(
        base_url=settings.url.rstrip("/") + "/",
        trust_env=httpx.URL(settings.url).host not in LOOPBACK,
        headers={"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {},
        timeout=httpx.Timeout(settings.retry.timeout_s, connect=CONNECT_TIMEOUT_S, pool=None),
        limits=httpx.Limits(max_connections=settings.concurrency, max_keepalive_connections=settings.concurrency),
    ) as http:
        yield http


def _chosen_model(settings: ServerSettings, entries: list[dict[str, Any]]) -> tuple[str, int | None]:
    """(name, longest context): the length is told by vLLM and SGLang."""
    served = {str(entry["id"]): entry for entry in entries}
    model = settings.model if settings.model is not None or len(served) != 1 else next(iter(served))
    if model not in served:
        asked = "none was named" if model is None else f"asked for is {model}"
        raise ValueError(f"server {settings.url} serves {sorted(served)}, {asked}: name one of them with --model")
    length = served[model].get("max_model_len")
    return model, length if isinstance(length, int) else None
