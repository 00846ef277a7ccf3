"""The demo's own logic: what it removes, and that Ctrl-C waits for the command to save."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

DEMO = Path(__file__).parents[1] / "examples" / "smollm2" / "demo.py"


def demo():
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_starting_over_removes_only_what_the_demo_made(tmp_path):
    for name in ("data", "train", "drafter", "mine"):
        (tmp_path / name).mkdir()
    for name in ("summary.json", "notes.json"):
        (tmp_path / name).write_text("{}")
    demo().start_over(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "notes.json"]


def test_ctrl_c_waits_until_the_command_has_saved(tmp_path):
    """Case 55: the terminal's SIGINT reaches both; the command needs a while to save."""
    saver = (
        "import pathlib, signal, sys, time\n"
        "def save(*_):\n    time.sleep(1.5)\n    pathlib.Path(sys.argv[1]).write_text('saved')\n    sys.exit(3)\n"
        "signal.signal(signal.SIGINT, save)\nprint('ready', flush=True)\ntime.sleep(60)\n"
    )
    (tmp_path / "saver.py").write_text(saver)
    runner = (
        f"import importlib.util, sys\nspec = importlib.util.spec_from_file_location('demo', {str(DEMO)!r})\n"
        "demo = importlib.util.module_from_spec(spec)\nspec.loader.exec_module(demo)\n"
        f"demo.run_to_its_end([sys.executable, {str(tmp_path / 'saver.py')!r}, {str(tmp_path / 'saved')!r}])\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", runner], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=30) == 3
    assert (tmp_path / "saved").read_text() == "saved"
