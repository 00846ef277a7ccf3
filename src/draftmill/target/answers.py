"""Prompts, the target's answers to them, and the file that gathers the answers so that a kill loses none.

Always true of the file: lines are only appended, and synced before they count; a line cut short by a kill is removed
at the next start; a prompt has at most one line in it, or in `<out>.empty.jsonl` where the target answered nothing.
`<out>.settings.json` says how the answers were made; going on with other settings is refused. No torch.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, Protocol, Self

log = logging.getLogger(__name__)

RENDERED_WITH = ("tools", "chat_template_kwargs")  # fields of a row, besides its messages
Finish = Literal["stop", "length"]
Place = Literal["written", "empty"]


@dataclass(frozen=True, slots=True)
class Sampling:
    max_new_tokens: int
    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}: use at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}: use 0 for greedy, or a positive value")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: use a value above 0, up to 1")


@dataclass(frozen=True, slots=True)
class Prompt:
    key: str  # the row's identity: file name and line. Also what its sampling depends on
    token_ids: list[int]
    messages: list[dict[str, Any]]  # what the ids were rendered from
    rendered_with: dict[str, Any] = field(default_factory=dict)  # of RENDERED_WITH, those the row has


@dataclass(frozen=True, slots=True)
class Answer:
    token_ids: tuple[int, ...] | None  # the stop token included, where one was generated; None: a server did not tell
    text: str  # without the stop token
    finish: Finish
    tokens: int  # generated

    @classmethod
    def from_ids(cls, token_ids: Sequence[int], tokenizer: Any, stop_ids: Collection[int]) -> Self:
        """Ends with the first stop token; without one it was cut for its length."""
        end = next((index for index, token in enumerate(token_ids) if token in stop_ids), len(token_ids))
        text = tokenizer.decode(token_ids[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        kept = tuple(token_ids[: end + 1])
        return cls(kept, text, "stop" if end < len(token_ids) else "length", len(kept))


Answered = Sequence[tuple[Prompt, Answer]]
IsWanted = Callable[[Prompt], bool]  # called once for each prompt
OnAnswers = Callable[[Answered], None]
OnRefusal = Callable[[Prompt, str, str], None]  # (prompt, reason in one word, detail)
OnProgress = Callable[[int, int], None]  # (prompts ended since the call began, tokens generated since then)


class Answerer(Protocol):
    """Whoever answers prompts: the target in this process, or a server that holds it."""

    @property
    def tokenizer(self) -> Any: ...

    @property
    def stop_ids(self) -> Collection[int]: ...

    @property
    def context_length(self) -> int | None: ...  # tokens of prompt and answer together; None: not known

    def made_by(self) -> dict[str, Any]: ...  # what must stay the same within one file, JSON values only

    def answer(
        self,
        prompts: Iterable[Prompt],
        is_wanted: IsWanted,
        sampling: Sampling,
        on_answers: OnAnswers,
        on_refusal: OnRefusal,
        on_progress: OnProgress | None = None,
    ) -> str | None:
        """Hands each wanted prompt with its answer to `on_answers`, each at most once.

        Returns None when it went through all prompts; otherwise why it stopped before their end, in a sentence.
        A wanted prompt without an answer is handed to `on_refusal`, or is among those it stopped before.
        """
        ...


class AnswerFile:
    """Use as a context manager: holds the file's lock, so that two processes do not write to it."""

    def __init__(self, out: Path, settings: Mapping[str, Any]) -> None:
        self.out = out
        self.empty = out.with_name(out.name + ".empty.jsonl")
        self.settings = dict(settings)

    def __enter__(self) -> Self:
        """Raises ValueError where the file was made with other settings, or is being written."""
        self._files: dict[Place, IO[bytes]] = {"written": open_for_append(self.out)}
        try:
            self._files["empty"] = open_for_append(self.empty)
            check_settings(self.out, self.settings, is_new=all(_size(file) == 0 for file in self._files.values()))
            self._prompts = {place: _written_rows(file, self._path(place)) for place, file in self._files.items()}
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if "empty" in self._files and _size(self._files["empty"]) == 0:
            self.empty.unlink()
        for file in self._files.values():
            file.close()

    def place_of(self, prompt: Prompt) -> Place | None:
        """Where the prompt's answer is. Raises ValueError if another prompt was answered under its key."""
        for place, written in self._prompts.items():
            if prompt.key not in written:
                continue
            if written[prompt.key] != _digest(prompt.messages, prompt.rendered_with):
                raise ValueError(
                    f"{self._path(place)} answers another prompt for {prompt.key}: "
                    "the prompts changed, use a new output file"
                )
            return place
        return None

    def _path(self, place: Place) -> Path:
        return self.out if place == "written" else self.empty

    def append(self, answered: Answered) -> None:
        """Synced when it returns."""
        lines: dict[Place, list[bytes]] = {"written": [], "empty": []}
        for prompt, answer in answered:
            line: dict[str, Any] = {"messages": [*prompt.messages, {"role": "assistant", "content": answer.text}]}
            if answer.token_ids is not None:
                line["response_ids"] = list(answer.token_ids)
            line |= {"finish": answer.finish, "source": prompt.key, **prompt.rendered_with}
            lines[place_for(answer)].append(json.dumps(line, ensure_ascii=False).encode() + b"\n")
        for place, encoded in lines.items():
            if encoded:
                append_synced(self._files[place], encoded)


def place_for(answer: Answer) -> Place:
    return "written" if answer.text.strip() else "empty"


def append_synced(file: IO[bytes], lines: Sequence[bytes]) -> None:
    file.write(b"".join(lines))
    file.flush()
    os.fsync(file.fileno())


def open_for_append(out: Path) -> IO[bytes]:
    """Raises ValueError while another process has it open."""
    out.parent.mkdir(parents=True, exist_ok=True)
    file = out.open("a+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise ValueError(f"{out} is being written by another process: wait for it, or choose another file") from None
    return file


def read_appended(file: IO[bytes], out: Path) -> Iterator[dict[str, Any]]:
    """The JSON rows of a file of ours, after cutting a last line that a kill left unfinished.

    Each has `source` and `messages`; ValueError at any other line. Leaves the file at its end.
    """
    file.seek(0)
    end = 0
    for number, line in enumerate(file, 1):
        if not line.endswith(b"\n"):  # a kill: even a line that parses may lack its last digits
            log.warning("%s: cutting the unfinished last line %d", out, number)
            file.truncate(end)
            break
        try:
            row = json.loads(line)
            valid = isinstance(row["source"], str) and isinstance(row["messages"], list)
        except (ValueError, TypeError, KeyError):
            valid = False
        if not valid:
            raise ValueError(f"{out}:{number} is not a row written by regenerate: repair it, or choose another file")
        yield row
        end += len(line)
    file.seek(0, os.SEEK_END)


def _written_rows(file: IO[bytes], out: Path) -> dict[str, bytes]:
    """key -> digest of the prompt, of the rows already there: rows themselves may be too many for the memory."""
    return {
        row["source"]: _digest(row["messages"][:-1], {name: row[name] for name in RENDERED_WITH if name in row})
        for row in read_appended(file, out)
    }


def _digest(messages: Sequence[Mapping[str, Any]], rendered_with: Mapping[str, Any]) -> bytes:
    return hashlib.sha256(json.dumps([messages, rendered_with], sort_keys=True).encode()).digest()


def _size(file: IO[bytes]) -> int:
    return os.fstat(file.fileno()).st_size


def check_settings(out: Path, settings: Mapping[str, Any], *, is_new: bool) -> None:
    """Writes them beside a new file, compares them with what is beside an older one."""
    path = out.with_name(out.name + ".settings.json")
    settings = json.loads(json.dumps(settings))  # as they come back: tuples become lists
    if not is_new:
        if not path.exists():
            raise ValueError(f"{out} has rows, but {path.name}, which says how they were made, is gone: use a new file")
        before = json.loads(path.read_text(encoding="utf-8"))
        for name in sorted(before.keys() | settings.keys()):
            if before.get(name) != settings.get(name):
                raise ValueError(
                    f"{out} was made with {name}={before.get(name)}, now it is {settings.get(name)}: "
                    "use the same value to go on, or a new output file"
                )
    aside = path.with_name(path.name + ".tmp")
    aside.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    aside.replace(path)
