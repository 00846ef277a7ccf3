"""Measures the data path: prepare, the usual `datasets.map` way, random reading, a run's start, packing.

    python benchmarks/make_conversations.py 100000 chats.jsonl
    python benchmarks/data.py prepare chats.jsonl --target TARGET --out DIR [--workers 2] [--kill-after 300000]
    python benchmarks/data.py map chats.jsonl --target TARGET --out DIR [--workers 2]
    python benchmarks/data.py read DIR/prepared
    python benchmarks/data.py pack

Each prints one JSON object. Rates are per second of CPU time over all processes (`..._per_core`) and of wall time.
Memory is the sum of the peaks (VmHWM) of all processes of the measured command, pages that they share counted twice.
`map` needs the package `datasets`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

MASK_TOKEN = "3"  # <repo_name> of SmolLM2, whose tokenizer has no mask token


def measured(command: list[str], kill_after: int | None = None, journal: Path | None = None) -> dict[str, Any]:
    """Runs `command`; wall and CPU seconds, and the peak memory of its processes in MB."""
    started = time.perf_counter()
    process = subprocess.Popen(command, start_new_session=True)
    peaks: dict[int, int] = {}
    used: dict[int, float] = {}
    killed_at = 0
    while process.poll() is None:
        for pid in tree(process.pid):
            peaks[pid] = max(peaks.get(pid, 0), peak_kb(pid))
            used[pid] = max(used.get(pid, 0.0), cpu_seconds(pid))
        if kill_after and journal and journal.exists():
            killed_at = json.loads(journal.read_text())["state"]["raws"]
            if killed_at >= kill_after:
                os.kill(process.pid, signal.SIGKILL)
        time.sleep(0.2)
    if process.returncode and not (kill_after and process.returncode == -signal.SIGKILL):
        raise SystemExit(f"{command[:4]} ended with {process.returncode}")
    return {
        "wall_s": round(time.perf_counter() - started, 1),
        "cpu_s": round(sum(used.values()), 1),
        "peak_mb": round(sum(peaks.values()) / 1024),
        "peak_mb_largest_process": round(max(peaks.values()) / 1024),
        **({"killed_at_row": killed_at} if kill_after else {}),
    }


def tree(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(each for child in children for each in tree(int(child)))]


def cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_kb(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)


def prepare(arguments: argparse.Namespace) -> dict[str, Any]:
    out = arguments.out / "prepared"
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "draftmill.cli", "prepare", str(arguments.conversations)]
    command += ["--target", arguments.target, "--out", str(out), "--mask-token-id", MASK_TOKEN]
    command += ["--workers", str(arguments.workers)]
    result: dict[str, Any] = {}
    if arguments.kill_after:
        journal = out.with_name(out.name + ".partial") / "journal.json"
        result["killed"] = measured(command, arguments.kill_after, journal)
    result["finished"] = measured(command)
    manifest = json.loads((out / "manifest.json").read_text())
    counts = manifest["counts"]
    if counts["rows_in"] != counts["kept"] + sum(counts["dropped"].values()):
        raise SystemExit(f"the account does not add up: {counts}")
    cpu = sum(part["cpu_s"] for part in result.values())
    wall = sum(part["wall_s"] for part in result.values())
    result |= rates(counts["rows_in"], manifest["tokens"], cpu, wall)
    return result | {"counts": counts, "fingerprint": manifest["fingerprint"], "sha256": file_hashes(out)}


def file_hashes(folder: Path) -> dict[str, str]:
    listed = subprocess.run(
        ["sha256sum", *sorted(map(str, folder.iterdir()))], capture_output=True, text=True, check=True
    )
    return {Path(line.split()[1]).name: line.split()[0][:16] for line in listed.stdout.splitlines()}


def rates(rows: int, tokens: int, cpu: float, wall: float) -> dict[str, Any]:
    return {
        "rows": rows,
        "tokens": tokens,
        "rows_per_core": round(rows / cpu),
        "tokens_per_core": round(tokens / cpu),
        "rows_per_s": round(rows / wall),
        "tokens_per_s": round(tokens / wall),
    }


def usual_way(arguments: argparse.Namespace) -> dict[str, Any]:
    """`datasets.map` with `apply_chat_template`: token ids alone, without supervision and without an account."""
    out = arguments.out / "map"
    shutil.rmtree(out, ignore_errors=True)
    result = measured([sys.executable, __file__, "map-itself", str(arguments.conversations), "--target",
                       arguments.target, "--out", str(out), "--workers", str(arguments.workers)])  # fmt: skip
    count = json.loads((out / "count.json").read_text())
    return result | rates(count["rows"], count["tokens"], result["cpu_s"], result["wall_s"])


def map_itself(arguments: argparse.Namespace) -> None:
    import pyarrow.compute as pc
    from datasets import load_dataset
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    arguments.out.mkdir(parents=True, exist_ok=True)
    good = arguments.out / "good.jsonl"  # its JSON reader stops at the first bad line
    if not good.exists():
        with arguments.conversations.open() as lines, good.open("w") as file:
            file.writelines(line for line in lines if len(line) > 120)
    rows = load_dataset("json", data_files=str(good), split="train", cache_dir=str(arguments.out / "cache"))

    def render(row: dict[str, Any]) -> dict[str, Any]:
        return {
            "input_ids": tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=True)["input_ids"]
        }

    many = arguments.workers if arguments.workers > 1 else None
    mapped = rows.map(render, remove_columns=rows.column_names, num_proc=many)
    tokens = pc.sum(pc.list_value_length(mapped.data.column("input_ids"))).as_py()
    (arguments.out / "count.json").write_text(json.dumps({"rows": len(mapped), "tokens": tokens}))


def read(arguments: argparse.Namespace) -> dict[str, Any]:
    """Opening, a run's first packs, and rows at random, in a fresh process."""
    from draftmill.text.dataset import PreparedDataset
    from draftmill.text.packing import PackStream

    imported = peak_kb(os.getpid())
    started = time.perf_counter()
    dataset = PreparedDataset.open(arguments.dataset)
    opened = time.perf_counter()
    stream = PackStream(dataset, pack_settings(), seed=0)
    planned = time.perf_counter()
    stream.packs_in_epoch(0)
    for _ in range(8):
        next(stream)
    first = time.perf_counter()
    anonymous = rss_anonymous_kb()
    order = np.random.default_rng(0).integers(0, len(dataset), 20_000)
    tokens = 0
    for index in order.tolist():
        token_ids, supervised = dataset.row(index)
        tokens += int(token_ids[-1] >= 0) + int(supervised[0])
    done = time.perf_counter()
    return {
        "rows": len(dataset),
        "open_s": round(opened - started, 3),
        "planner_s": round(planned - opened, 3),
        "epoch_plan_and_8_packs_s": round(first - planned, 3),
        "random_row_us": round(1e6 * (done - first) / len(order), 1),
        "before_opening_mb": round(imported / 1024),
        "anonymous_mb_after_planning": round(anonymous / 1024),
        "anonymous_mb_after_random_reads": round(rss_anonymous_kb() / 1024),
        "padding": round(stream.padding_share(0), 4),
    }


def rss_anonymous_kb() -> int:
    """Memory of this process that is not a file's mapped pages, which the system takes back when it needs them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def pack_settings() -> Any:
    return SimpleNamespace(pack_tokens=8192, anchor_rate=0.0625, anchors_per_document=512, pack_window=1024)


def lpt(lengths: np.ndarray, capacity: int, packs: int) -> int | None:
    """Longest first, each into the emptiest of a given number of packs; the load of the fullest, None if over."""
    import heapq

    loads = [(0, pack) for pack in range(packs)]
    for length in sorted(lengths.tolist(), reverse=True):
        load, pack = heapq.heappop(loads)
        if load + length > capacity:
            return None
        heapq.heappush(loads, (load + length, pack))
    return max(loads)[0]


def lpt_packs(lengths: np.ndarray, capacity: int) -> int:
    """The fewest packs that LPT fills, as public packers use it: tried from the lower bound up."""
    packs = -(-int(lengths.sum()) // capacity)
    while lpt(lengths, capacity, packs) is None:
        packs += 1
    return packs


class Counted:
    """Rows of which only the counts are known; none is longer than a pack."""

    fingerprint, earlier = "counted", {}

    def __init__(self, lengths: np.ndarray, counts: Any) -> None:
        self.lengths, self._counts = lengths, counts

    def __len__(self) -> int:
        return len(self.lengths)

    def counts(self, limit: int) -> Any:
        return self._counts


def packing(arguments: argparse.Namespace) -> dict[str, Any]:
    """Padding on lognormal lengths (mean 1,100, sigma 0.8, at most 8,192), packs of 8,192, by seed."""
    from draftmill.text.packing import PackStream
    from draftmill.text.rows import RowCounts

    settings = pack_settings()
    padding: dict[str, list[float]] = {"ours": [], "ours_token_budget_alone": [], "lpt_token_budget_alone": []}
    seconds = {"ours": 0.0, "lpt": 0.0}
    for seed in range(arguments.seeds):
        draws = np.random.default_rng(seed).lognormal(np.log(1100) - 0.8**2 / 2, 0.8, arguments.documents)
        lengths = np.clip(draws, 8, 8192).astype(np.int64)
        prompts = np.random.default_rng(seed + 999).uniform(0, 0.02, len(lengths))  # so that anchors run out, too
        supervised = lengths - (lengths * prompts).astype(int)
        rows: Any = Counted(lengths, RowCounts(lengths, supervised, supervised - 1))
        started = time.perf_counter()
        padding["ours"].append(PackStream(rows, settings, seed).padding_share(0))
        seconds["ours"] += time.perf_counter() - started
        free = SimpleNamespace(**{**vars(settings), "anchors_per_document": 1})
        padding["ours_token_budget_alone"].append(PackStream(rows, free, seed).padding_share(0))
        order = np.random.default_rng(seed).permutation(lengths)
        started = time.perf_counter()
        windows = [order[at : at + settings.pack_window] for at in range(0, len(order), settings.pack_window)]
        packs = sum(lpt_packs(window, settings.pack_tokens) for window in windows)
        seconds["lpt"] += time.perf_counter() - started
        padding["lpt_token_budget_alone"].append(1 - lengths.sum() / (packs * settings.pack_tokens))
    result: dict[str, Any] = {
        "documents": arguments.documents,
        "seeds": arguments.seeds,
        "window": settings.pack_window,
    }
    for name, shares in padding.items():
        result[name] = {"min": round(min(shares), 5), "max": round(max(shares), 5)}
    return result | {f"{name}_s_per_epoch": round(total / arguments.seeds, 2) for name, total in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, function in (("prepare", prepare), ("map", usual_way), ("map-itself", map_itself)):
        command = commands.add_parser(name)
        command.add_argument("conversations", type=Path)
        command.add_argument("--target", required=True)
        command.add_argument("--out", type=Path, required=True)
        command.add_argument("--workers", type=int, default=os.cpu_count())
        command.add_argument("--kill-after", type=int, help="SIGKILL once so many input rows are safe; then go on")
        command.set_defaults(function=function)
    command = commands.add_parser("read")
    command.add_argument("dataset", type=Path)
    command.set_defaults(function=read)
    command = commands.add_parser("pack")
    command.add_argument("--documents", type=int, default=100_000)
    command.add_argument("--seeds", type=int, default=5)
    command.set_defaults(function=packing)
    arguments = parser.parse_args()
    if (result := arguments.function(arguments)) is not None:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
