"""Are the demo's shipped conversations the target's answers to its prompts, and the evaluation prompts held out?"""

from __future__ import annotations

import json
import runpy
from pathlib import Path

DEMO = Path(__file__).parent.parent / "examples" / "smollm2"


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (DEMO / name).read_text(encoding="utf-8").splitlines()]


def texts(name: str) -> list[str]:
    return [row["messages"][0]["content"] for row in rows(name)]


def test_the_prompt_files_are_what_their_script_writes():
    training, evaluation = runpy.run_path(str(DEMO / "make_prompts.py"))["prompts"]()
    assert texts("prompts-train.jsonl") == training
    assert texts("prompts-eval.jsonl") == evaluation
    assert len(evaluation) >= 32


def test_evaluation_prompts_ask_about_things_that_training_never_names():
    named = {word.strip(".,") for text in texts("prompts-train.jsonl") for word in text.split()}
    script = runpy.run_path(str(DEMO / "make_prompts.py"))
    things = [line.split()[0] for line in script["THINGS"].strip().splitlines()]
    held_out = [thing for thing in things if thing not in named]
    assert len(held_out) == len(things) // script["HELD_OUT_EVERY"]
    assert all(any(f" {thing} " in text for thing in held_out) for text in texts("prompts-eval.jsonl"))


def test_every_training_prompt_is_answered_once():
    prompts, answers = texts("prompts-train.jsonl"), rows("conversations.jsonl")
    lines = {int(row["source"].removeprefix("prompts-train.jsonl:")): row for row in answers}
    assert len(lines) == len(answers) == len(prompts)
    for number, prompt in enumerate(prompts, 1):
        assert lines[number]["messages"][0] == {"role": "user", "content": prompt}


def test_the_file_says_how_it_was_made():
    settings = json.loads((DEMO / "conversations.jsonl.settings.json").read_text())
    assert settings["temperature"] == 0.0
    longest = max(len(row["response_ids"]) for row in rows("conversations.jsonl"))
    assert longest <= settings["max_new_tokens"]
    for row in rows("conversations.jsonl"):
        assert (row["finish"] == "length") == (len(row["response_ids"]) == longest and row["response_ids"][-1] != 2)
    assert settings["target"]["converted_from"]["file"] == "SmolLM2-135M-Instruct.Q4_1.gguf"
