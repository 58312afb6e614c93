"""``LengthModel``: how long requests still run; ``spread_siblings``: where they start."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

import equipoise as eq


def test_siblings_that_finished_tell_of_those_that_run() -> None:
    model = eq.LengthModel()
    for length in (100, 120, 90):
        model.finish("easy", length)
    easy, hard = model.expect(["easy", "hard"], [500, 500])
    assert easy < hard


def test_the_more_siblings_still_run_the_longer_they_are_expected_to() -> None:
    model = eq.LengthModel()
    for prompt, done in (("a", 14), ("b", 6), ("c", 1)):
        for _ in range(done):
            model.finish(prompt, 800)
    prompts = ["a"] * 2 + ["b"] * 10 + ["c"] * 15
    expected = model.expect(prompts, [1000] * len(prompts))
    assert expected[0] < expected[2] < expected[12]


def test_earlier_rollouts_of_the_prompt_are_its_prior_by_their_median() -> None:
    model = eq.LengthModel(weight=1000.0)
    for length in (10, 2000, 9000):
        model.finish("seen", length)
    model.next_rollout()
    assert model.expect(["seen"], [500])[0] == pytest.approx(1500.0, rel=0.01)


def test_history_forgets_beyond_its_window() -> None:
    model = eq.LengthModel(window=2, weight=1000.0)
    for length in (10_000, 10_000, 100, 100):
        model.finish("seen", length)
    model.next_rollout()
    assert model.expect(["seen"], [0])[0] == pytest.approx(100.0, rel=0.01)


def test_with_nothing_finished_all_are_expected_alike_and_longer_with_age() -> None:
    model = eq.LengthModel()
    young, old = model.expect(["a", "b"], [10, 10]), model.expect(["a", "b"], [1000, 1000])
    assert young[0] == young[1]
    assert old[0] > young[0] > 0


def test_predicts_better_than_no_prompt_would() -> None:
    """Long-tailed lengths, 16 siblings: mean rank correlation with what really is left, at step 1000."""
    draw = np.random.default_rng(0)
    length = np.exp(7 + 0.7 * draw.standard_normal((64, 1)) + 0.7 * draw.standard_normal((64, 16)))
    model = eq.LengthModel()
    prompts: list[int] = []
    left: list[float] = []
    for prompt, siblings in enumerate(length.tolist()):
        for each in siblings:
            if each <= 1000:
                model.finish(prompt, int(each))
            else:
                prompts.append(prompt)
                left.append(each - 1000)
    expected = model.expect(prompts, [1000] * len(prompts))
    ranks = [np.argsort(np.argsort(values)) for values in (expected, np.array(left))]
    assert np.corrcoef(ranks[0], ranks[1])[0, 1] > 0.3


def test_refuses_counts_that_do_not_match() -> None:
    with pytest.raises(eq.InvalidInput, match="generated"):
        eq.LengthModel().expect(["a", "b"], [1])
    with pytest.raises(eq.InvalidInput, match="length"):
        eq.LengthModel().finish("a", -1)
    with pytest.raises(eq.InvalidInput, match="weight"):
        eq.LengthModel(weight=0)


def test_refuses_what_is_no_number_or_no_name() -> None:
    text: Any = "3"
    with pytest.raises(eq.InvalidInput, match=r"window.*'3'"):
        eq.LengthModel(window=text)
    with pytest.raises(eq.InvalidInput, match=r"weight.*'3'"):
        eq.LengthModel(weight=text)
    with pytest.raises(eq.InvalidInput, match=r"length.*'3'"):
        eq.LengthModel().finish("a", text)
    nameless: Any = [["a"]]
    none: Any = None
    with pytest.raises(eq.InvalidInput, match="prompts"):
        eq.LengthModel().finish(nameless, 3)
    for prompts in (nameless, none):
        with pytest.raises(eq.InvalidInput, match="prompts"):
            eq.LengthModel().expect(prompts, [1])
    for generated in (["x"], [float("nan")], [-1], None):
        with pytest.raises(eq.InvalidInput, match="generated"):
            eq.LengthModel().expect(["a"], generated)


def test_no_more_prompts_are_remembered_than_asked_for_and_the_least_recently_used_go_first() -> None:
    model = eq.LengthModel(max_prompts=3, weight=1e6)

    def remembered(*prompts: str) -> list[bool]:
        return [model.expect([prompt], [0])[0] == pytest.approx(1000.0, rel=0.01) for prompt in prompts]

    for prompt in "abc":
        model.finish(prompt, 1000)
    model.next_rollout()
    model.expect(["a"], [0])
    model.finish("b", 1000)
    model.next_rollout()
    model.finish("d", 1000)
    model.next_rollout()  # "c" was used before "a" and "b"
    assert remembered("c", "d", "a", "b") == [False, True, True, True]
    model.finish("a", 1000)
    model.finish("e", 1000)
    model.next_rollout()  # of "d", "a", "b" as asked for above, then "a" again
    assert remembered("d", "a", "b", "e") == [False, True, True, True]


def test_memory_stays_bounded_within_a_rollout_and_over_many() -> None:
    model = eq.LengthModel(max_prompts=50)

    def pickled() -> int:
        return len(pickle.dumps(model))

    for number in range(50):
        model.finish(f"prompt {number:05}", 100)
    within = pickled()
    for number in range(50, 5000):
        model.finish(f"prompt {number:05}", 100)
    assert pickled() <= within + 50
    model.next_rollout()
    once = pickled()
    for rollout in range(40):
        for number in range(50):
            model.finish(f"prompt {rollout * 50 + number:05}", 100)
        model.next_rollout()
    assert pickled() <= once + 50


@pytest.mark.parametrize("number", [0, 2.5, "3", None, True])
def test_refuses_a_bound_that_is_no_number_of_prompts(number: Any) -> None:
    with pytest.raises(eq.InvalidInput, match=f"max_prompts.*{number!r}"):
        eq.LengthModel(max_prompts=number)


def test_siblings_part_and_ranks_get_as_many() -> None:
    """Case M4: 8 rollouts of a prompt, 32 ranks."""
    groups = [f"p{i // 8}" for i in range(8 * 100)]
    rank = eq.spread_siblings(groups, 32)
    assert np.bincount(rank, minlength=32).tolist() == [25] * 32
    assert all(len(set(rank[i : i + 8].tolist())) == 8 for i in range(0, 800, 8))


def test_siblings_need_not_be_neighbours() -> None:
    rank = eq.spread_siblings(["a", "b"] * 4, 4)
    assert sorted(rank[::2].tolist()) == sorted(rank[1::2].tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize("groups", [None, 5, [["a"], ["b"]]])
def test_groups_need_names(groups: Any) -> None:
    with pytest.raises(eq.InvalidInput, match="group_ids"):
        eq.spread_siblings(groups, 2)
