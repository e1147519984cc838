"""The corpus: found, split and drawn from the same way everywhere."""

import pytest
import torch
from data import (
    Batches,
    evaluation_starts,
    find_sources,
    is_held_out,
    load_corpus,
    split_sources,
    windows,
)


@pytest.fixture(scope="module")
def corpus():
    return load_corpus()


def _write(root, name, text="x = 1\n"):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_split_is_disjoint_complete_and_the_same_in_any_order():
    names = [f"package/module_{i}.py" for i in range(400)]
    split = split_sources(names)
    assert set(split.train) | set(split.held_out) == set(names)
    assert not set(split.train) & set(split.held_out)
    assert split_sources(names[::-1]).held_out == split.held_out[::-1]


def test_share_held_out_is_near_one_in_twenty():
    # Binomial, n = 4000, p = 0.05: standard deviation 0.0034, so 0.015 is more than four of them.
    share = sum(is_held_out(f"module_{i}.py") for i in range(4000)) / 4000
    assert abs(share - 0.05) < 0.015


def test_a_files_part_does_not_depend_on_the_other_files():
    assert is_held_out("ast.py") is is_held_out("ast.py")
    names = [f"m{i}.py" for i in range(200)]
    held_out = split_sources(names).held_out
    assert split_sources(names[:150]).held_out == tuple(n for n in held_out if n in names[:150])


def test_too_few_files_are_an_error():
    with pytest.raises(ValueError, match="0 source files give 0 for training and 0 held out"):
        split_sources([])


def test_packages_tests_and_generated_files_are_left_out(tmp_path):
    for name in (
        "ast.py",
        "json/decoder.py",
        "test/test_ast.py",
        "unittest/test/test_case.py",
        "idlelib/idle_test/test_editor.py",
        "site-packages/numpy/core.py",
        "encodings/cp1250.py",
        "_sysconfigdata_linux.py",
        "notes.txt",
    ):
        _write(tmp_path, name)
    _write(tmp_path, "empty.py", "")
    _write(tmp_path, "test.py")  # a file of that name is no test folder
    assert find_sources(tmp_path) == ["ast.py", "json/decoder.py", "test.py"]


def test_both_parts_of_the_real_corpus_hold_text(corpus):
    assert len(corpus.train) > 1_000_000
    assert len(corpus.held_out) > 50_000
    assert corpus.train.dtype == corpus.held_out.dtype == torch.uint8
    assert int((corpus.held_out == 0).sum()) == corpus.facts["num_held_out_files"]


def test_loading_twice_gives_the_same_text(corpus):
    again = load_corpus()
    assert again.facts == corpus.facts
    assert torch.equal(again.held_out, corpus.held_out)


def test_batches_repeat_with_the_seed_and_differ_by_rank_and_step():
    text = torch.arange(250, dtype=torch.uint8)

    def draws(seed, rank):
        batches = Batches(text, context=8, batch=3, seed=seed)
        return torch.stack([batches.draw(rank, 2)[0] for _ in range(4)])

    assert torch.equal(draws(0, 0), draws(0, 0))
    assert not torch.equal(draws(0, 0), draws(0, 1))
    assert not torch.equal(draws(0, 0), draws(1, 0))
    assert not torch.equal(draws(0, 0)[0], draws(0, 0)[1])


def test_two_ranks_read_what_one_rank_of_twice_the_batch_reads():
    text = torch.arange(250, dtype=torch.uint8)
    one = Batches(text, context=8, batch=6, seed=3).draw(0, 1)[0]
    two = [Batches(text, context=8, batch=3, seed=3).draw(rank, 2)[0] for rank in (0, 1)]
    assert torch.equal(one, torch.cat(two))


def test_targets_are_the_next_bytes():
    text = torch.arange(100, dtype=torch.uint8)
    tokens, targets = windows(text, torch.tensor([0, 50]), 10)
    assert tokens.shape == targets.shape == (2, 10)
    assert torch.equal(targets, tokens + 1)


def test_text_shorter_than_a_window_is_an_error():
    with pytest.raises(ValueError, match="context must be below the text's 8 bytes, got 8"):
        Batches(torch.zeros(8, dtype=torch.uint8), context=8, batch=1, seed=0)


@pytest.mark.parametrize(("length", "num_windows"), [(1000, 7), (1001, 100), (11, 1)])
def test_evaluation_windows_fit_and_do_not_overlap(length, num_windows):
    text = torch.zeros(length, dtype=torch.uint8)
    starts = evaluation_starts(text, context=10, num_windows=num_windows)
    assert len(starts) == num_windows
    assert int(starts[-1]) + 10 + 1 <= length
    assert (starts.diff() >= 10).all()


def test_more_evaluation_windows_than_fit_are_an_error():
    with pytest.raises(ValueError, match="num_windows must be at most 9 for this text, got 10"):
        evaluation_starts(torch.zeros(100, dtype=torch.uint8), context=10, num_windows=10)
