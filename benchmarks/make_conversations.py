"""Writes any number of conversations for measuring `draftmill prepare`: real words, lengths as in chats, some bad.

    python benchmarks/make_conversations.py 1000000 chats.jsonl

The words are runs of 4 to 40 words of the replies in examples/smollm2. One to three turns; replies have lognormal
lengths. One row in a thousand is bad, of five kinds in turn. The file is a function of the arguments.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

CORPUS = Path(__file__).parent.parent / "examples" / "smollm2" / "conversations.jsonl"
BAD = [
    '{"messages": [{"role": "user", "content": "cut off',
    '{"messages": []}',
    '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": ""}]}',
    '{"messages": [{"role": "critic", "content": "q"}, {"role": "assistant", "content": "a"}]}',
    '{"messages": [{"role": "assistant", "content": "no question"}]}',
]
BAD_EVERY = 1000
_MEAN_REPLY_WORDS, _SIGMA = 55, 0.8


def corpus_words() -> list[str]:
    rows = map(json.loads, CORPUS.read_text(encoding="utf-8").splitlines())
    return " ".join(message["content"] for row in rows for message in row["messages"]).split(" ")


def write_conversations(path: Path, count: int, seed: int = 0) -> None:
    """`count` lines, the bad ones among them."""
    rng = np.random.default_rng(seed)
    words = corpus_words()

    def text(length: int) -> str:
        parts = []
        while length > 0:
            run = min(length, 4 + draw() % 37)
            start = draw() % (len(words) - run)
            parts += words[start : start + run]
            length -= run
        return " ".join(parts).strip() or "word"

    stock: list[int] = []

    def draw() -> int:
        if not stock:
            stock.extend(rng.integers(0, 2**31, 65536).tolist())
        return stock.pop()

    with path.open("w", encoding="utf-8") as file:
        for first in range(0, count, 65536):
            rows = min(65536, count - first)
            turns = rng.choice([1, 2, 3], rows, p=[0.6, 0.25, 0.15]).tolist()
            mu = np.log(_MEAN_REPLY_WORDS) - _SIGMA**2 / 2
            replies = np.clip(rng.lognormal(mu, _SIGMA, (rows, 3)), 2, 4000).astype(int).tolist()
            for i in range(rows):
                if (first + i) % BAD_EVERY == BAD_EVERY - 1:
                    file.write(BAD[(first + i) // BAD_EVERY % len(BAD)] + "\n")
                    continue
                messages = []
                for reply in replies[i][: turns[i]]:
                    messages.append({"role": "user", "content": text(5 + draw() % 40)})
                    messages.append({"role": "assistant", "content": text(reply)})
                file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int)
    parser.add_argument("path", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_conversations(arguments.path, arguments.count, arguments.seed)


if __name__ == "__main__":
    main()
