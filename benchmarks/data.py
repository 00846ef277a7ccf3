"""`draftmill prepare` at size: rows and tokens per second against plain `datasets.map`, peak memory, and a run's start.

    python benchmarks/data.py --target TARGET [--rows 100000] [--rivals] [--workers 1 2]

Conversations are synthetic: one to three turns of made-up sentences, at least 120 tokens on average. The rival is what
people write: `datasets.load_dataset("json").map(apply_chat_template)`, which gives token ids and no supervision.
Memory is the sum of the highest resident sizes of the process and its children.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

WORDS = [
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state",
    "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system",
    "program", "question", "work", "government", "number", "night", "point", "home", "water", "room", "mother",
    "area", "money", "story", "fact", "month", "lot", "right", "study", "book", "eye", "job", "word", "business",
    "issue", "side", "kind", "head", "house", "service",
]  # fmt: skip

RIVAL = """
import sys
from datasets import load_dataset
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
rows = load_dataset("json", data_files=sys.argv[1], split="train", cache_dir=sys.argv[3])
def render(row):
    return {"input_ids": tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=True)["input_ids"]}
rows.map(render, remove_columns=rows.column_names, num_proc=int(sys.argv[4])).save_to_disk(sys.argv[3] + "/out")
"""
START = """
import sys, time
from types import SimpleNamespace
begun = time.perf_counter()
from draftmill.text.dataset import PreparedDataset
from draftmill.text.packing import PackStream
dataset = PreparedDataset.open(sys.argv[1])
opened = time.perf_counter()
settings = SimpleNamespace(pack_tokens=8192, anchor_rate=1 / 16, anchors_per_document=512, pack_window=4096)
stream = PackStream(dataset, settings, 0)
next(stream)
first = time.perf_counter()
import random
for _ in range(10_000):
    dataset.row(random.randrange(len(dataset)))
read = time.perf_counter()
peak = next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("RssAnon")) / 1024
print(f"{len(dataset)} rows: opened in {opened - begun:.2f} s, first pack after {first - opened:.2f} s more, "
      f"10,000 random rows in {read - first:.2f} s, {peak:.0f} MiB of its own")
"""


def sentence(draw: random.Random, words: int) -> str:
    return " ".join(draw.choices(WORDS, k=words)).capitalize() + "."


def generate(path: Path, rows: int, seed: int = 0) -> None:
    draw = random.Random(seed)
    with path.open("w") as file:
        for _ in range(rows):
            messages = []
            for _ in range(draw.choice((1, 1, 2, 3))):
                messages.append({"role": "user", "content": sentence(draw, draw.randint(5, 25))})
                text = " ".join(sentence(draw, draw.randint(6, 18)) for _ in range(draw.randint(2, 9)))
                messages.append({"role": "assistant", "content": text})
            file.write(json.dumps({"messages": messages}) + "\n")


@dataclass
class Measured:
    seconds: float
    peak_mib: float


def measure(command: list[str]) -> Measured:
    """Runs `command` to its end; the highest resident size of each process of its tree, summed up."""
    begun = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    peaks: dict[int, float] = {}
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.2):
            for pid in tree(process.pid):
                peaks[pid] = max(peaks.get(pid, 0.0), high_water(pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    _, errors = process.communicate()
    seconds = time.perf_counter() - begun
    done.set()
    watcher.join()
    if process.returncode:
        raise SystemExit(errors.decode()[-2000:])
    return Measured(seconds, sum(peaks.values()))


def tree(pid: int) -> list[int]:
    found = [pid]
    for parent in found:
        try:
            for task in Path(f"/proc/{parent}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
        except OSError:
            continue
    return found


def high_water(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM")), 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--mask-token-id", default="0")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rivals", action="store_true", help="measure datasets.map as well, in turns")
    parser.add_argument("--repeats", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "rows.jsonl", Path(folder) / "prepared"
        generate(source, arguments.rows)
        print(f"{arguments.rows:,} conversations, {source.stat().st_size / 2**20:.0f} MiB", flush=True)
        for number in range(arguments.repeats):
            for workers in arguments.workers:
                ours = [sys.executable, "-m", "draftmill.cli", "prepare", str(source), "--target", arguments.target]
                ours += [
                    "--out",
                    str(out),
                    "--workers",
                    str(workers),
                    "--overwrite",
                    "--mask-token-id",
                    arguments.mask_token_id,
                ]
                report("prepare", measure(ours), workers, out, arguments.rows)
                if arguments.rivals:
                    cache = f"{folder}/rival-{number}-{workers}"
                    rival = [sys.executable, "-c", RIVAL, str(source), arguments.target, cache, str(workers)]
                    report("datasets.map", measure(rival), workers, out, arguments.rows)
        subprocess.run([sys.executable, "-c", START, str(out)], check=True)


def report(name: str, found: Measured, workers: int, prepared: Path, rows: int) -> None:
    tokens = json.loads((prepared / "manifest.json").read_text())["tokens"]
    print(
        f"{name:>14}, {workers} processes: {found.seconds:7.1f} s, per process "
        f"{rows / found.seconds / workers:7.0f} rows/s {tokens / found.seconds / workers:9.0f} tokens/s "
        f"(mean {tokens / rows:.0f}), peak {found.peak_mib:.0f} MiB",
        flush=True,
    )


if __name__ == "__main__":
    main()
