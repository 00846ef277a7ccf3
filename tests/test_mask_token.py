"""Which token stands in the slots to predict, and is a bad choice refused? (case 9)"""

from __future__ import annotations

import numpy as np
import pytest

from draftmill.text.mask_token import choose_mask_token, mask_candidates
from text_helpers import byte_tokenizer

SMOL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<file_sep>"]


def smol(**named: str):
    """Special tokens as SmolLM2 has them: none is a mask token, none is named as reserved."""
    return byte_tokenizer(None, SMOL, eos_token="<|im_end|>", pad_token="<|im_end|>", bos_token="<|im_start|>", **named)


def never(tokenizer) -> np.ndarray:
    return np.zeros(len(tokenizer), dtype=np.int64)


def test_without_any_mask_token_the_error_names_the_setting_and_candidates():
    """case 9 a"""
    tokenizer = smol(unk_token="<|endoftext|>")
    repo, sep = tokenizer.convert_tokens_to_ids(["<repo_name>", "<file_sep>"])
    counts = never(tokenizer)
    with pytest.raises(ValueError, match=r"drafter\.mask_token_id.*--mask-token-id.*<repo_name>.*<file_sep>"):
        choose_mask_token(tokenizer, counts)
    counts[repo] = 1
    with pytest.raises(ValueError, match=rf"never occur in the data: {sep} <file_sep>$"):
        choose_mask_token(tokenizer, counts)
    assert mask_candidates(tokenizer, counts, ()) == [sep]
    assert mask_candidates(tokenizer, counts, {sep}) == []


def test_the_explicit_id_wins_and_its_occurrences_are_counted():
    """case 9 c"""
    tokenizer = smol(mask_token="<file_sep>")
    repo = tokenizer.convert_tokens_to_ids("<repo_name>")
    counts = never(tokenizer)
    chosen = choose_mask_token(tokenizer, counts, explicit=repo)
    assert (chosen.id, chosen.text, chosen.chosen_by, chosen.occurrences) == (repo, "<repo_name>", "explicit", 0)
    assert chosen.warning is None
    counts[repo] = 17
    assert "occurs 17 times" in (choose_mask_token(tokenizer, counts, explicit=repo).warning or "")


def test_an_id_outside_the_vocabulary_is_an_error():
    """case 9 d"""
    tokenizer = smol()
    size = len(tokenizer)
    for bad in (size, size + 5, -1):
        with pytest.raises(ValueError, match=rf"drafter\.mask_token_id is {bad}, .* {size} rows"):
            choose_mask_token(tokenizer, explicit=bad)
    assert choose_mask_token(tokenizer, never(tokenizer), explicit=size, vocab_size=size + 1).id == size


def test_pad_end_of_text_and_stop_tokens_are_never_the_mask():
    """case 9 b"""
    tokenizer = smol()
    end, repo = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<repo_name>"])
    with pytest.raises(ValueError, match=f"mask_token_id {end} is the target's end-of-text token"):
        choose_mask_token(tokenizer, explicit=end)
    with pytest.raises(ValueError, match=f"mask_token_id {repo} is the target's stop token"):
        choose_mask_token(tokenizer, explicit=repo, stop_ids={repo})
    with pytest.raises(ValueError, match="no mask token"):
        choose_mask_token(smol(mask_token="<|im_end|>"), None)


def test_the_tokenizers_own_mask_token_comes_before_reserved_rows():
    tokenizer = byte_tokenizer(None, ["<unused0>", "<mask>"], mask_token="<mask>")
    chosen = choose_mask_token(tokenizer, never(tokenizer))
    assert (chosen.text, chosen.chosen_by) == ("<mask>", "tokenizer")


def test_a_mask_token_outside_the_targets_vocabulary_is_passed_over():
    """case 9 d: a tokenizer may have more tokens than its target has rows"""
    tokenizer = byte_tokenizer(None, ["<unused0>", "<mask>"], mask_token="<mask>")
    assert choose_mask_token(tokenizer, vocab_size=tokenizer.mask_token_id).text == "<unused0>"
    with pytest.raises(ValueError, match="no mask token"):
        choose_mask_token(tokenizer, vocab_size=tokenizer.mask_token_id - 1)


@pytest.mark.parametrize(
    "name",
    ["<|reserved_special_token_0|>", "<unused0>", "[unused1]", "<|reserved_12|>", "<unused_3>", "<|unused7|>"],
)
def test_rows_that_the_tokenizer_names_as_reserved_are_taken(name):
    tokenizer = byte_tokenizer(None, ["<s>", name])
    chosen = choose_mask_token(tokenizer, never(tokenizer))
    assert (chosen.text, chosen.chosen_by) == (name, "reserved")


@pytest.mark.parametrize(
    "name", ["<repo_name>", "<|im_start|>", "reserved_special_token_0", "<unused>", "<|unused_tool|>"]
)
def test_other_names_are_not_reserved(name):
    with pytest.raises(ValueError, match="no mask token and no unused reserved token"):
        choose_mask_token(byte_tokenizer(None, [name]))


def test_a_reserved_row_that_occurs_in_the_data_is_passed_over():
    tokenizer = byte_tokenizer(None, ["<unused0>", "<unused1>", "<unused2>"], pad_token="<unused0>")
    first, second, third = tokenizer.convert_tokens_to_ids(["<unused0>", "<unused1>", "<unused2>"])
    counts = never(tokenizer)
    assert choose_mask_token(tokenizer, counts).id == second  # the first is the pad token
    counts[second] = 1
    assert choose_mask_token(tokenizer, counts).id == third
    counts[third] = 1
    with pytest.raises(ValueError, match="no unused reserved token"):
        choose_mask_token(tokenizer, counts)
    assert choose_mask_token(tokenizer, counts, explicit=first + 1).occurrences == 1
