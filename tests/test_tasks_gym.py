"""Tasks of reasoning-gym in the same jail. Runs where the library is installed; the table is checked everywhere."""

from __future__ import annotations

import importlib.util

import pytest

from refimpl.tasks import gym, gym_measure
from refimpl.tasks.gym_table import GYM, LEFT_OUT
from refimpl.tasks.pool import ScorerLimits, ScorerPool
from refimpl.tasks.table import find_task

needs_library = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None,
    reason="reasoning-gym is optional: pip install reasoning-gym==0.1.25 to run these",
)


def test_the_table_says_what_counts_as_solved() -> None:
    """106 tasks, each in or out; a word without meaning is solved nowhere, though it earns credit in some."""
    assert len(GYM) + len(LEFT_OUT) == 106 and not GYM.keys() & LEFT_OUT.keys()
    assert all(row.levels >= 1 and 0 <= row.nonsense < gym.SOLVED_AT and 0 <= row.guess <= 1 for row in GYM.values())
    assert max(row.nonsense for row in GYM.values()) > 0.01, "why partial credit does not train"
    assert LEFT_OUT["game_of_life_halting"] == "any text solves it"
    assert find_task("gym/basic_arithmetic").levels == GYM["basic_arithmetic"].levels


def test_unknown_and_left_out_tasks_are_refused() -> None:
    with pytest.raises(ValueError, match="any text solves it"):
        find_task("gym/game_of_life_halting")
    with pytest.raises(ValueError, match="unknown"):
        find_task("gym/nothing")


@pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is not None, reason="reasoning-gym is installed")
def test_without_the_library_the_error_says_what_to_install() -> None:
    with pytest.raises(ImportError, match=r"pip install reasoning-gym==0\.1\.25"):
        find_task("gym/basic_arithmetic").problem(0)


@pytest.mark.parametrize(
    ("answer", "given"),
    [
        ("<answer>5</answer>", "5"),
        ("<think><answer>4</answer></think><answer> 5 </answer> so", "5"),
        ("<answer>4</answer><answer>5", "5"),
        (" 5 ", "5"),
        ("", ""),
    ],
)
def test_the_last_tagged_answer_counts(answer: str, given: str) -> None:
    assert gym._given(answer) == given


@needs_library
@pytest.mark.peer
def test_problems_can_be_made_again() -> None:
    task = find_task("gym/chain_sum")
    gym._entry.cache_clear()
    first = task.problem(4, level=2)
    gym._entry.cache_clear()
    assert task.problem(4, level=2) == first
    assert task.problem(4, level=2, split="test").prompt != first.prompt
    assert first.prompt.endswith(gym.INSTRUCTION)


@needs_library
@pytest.mark.peer
def test_scored_in_the_jail() -> None:
    """The library's solution is solved, a wrong one is not, hostile text is a 0, and the library runs locked down."""
    names = ["gym/basic_arithmetic", "gym/polynomial_equations", "gym/figlet_font"]
    answers = []
    for name in names:
        problem = find_task(name).problem(1)
        number = int(problem.reference.split('"seed": ')[1].rstrip("}"))
        solution = gym._entry(name.removeprefix("gym/"), 0, number)[0]["answer"]
        answers += [
            (problem, f"<answer>{solution}</answer>"),
            (problem, gym_measure.NONSENSE),
            (problem, "9" * 100_000),
            (problem, "[" * 100_000),
            (problem, "9**9**9**9"),
            (problem, "().__class__.__base__.__subclasses__()"),
        ]
    with ScorerPool(names, processes=1, limits=ScorerLimits(time_s=5.0)) as pool:
        scores = pool.score(answers)
    for at in range(0, len(scores), 6):
        assert scores[at].solved, scores[at]
        assert not any(score.solved for score in scores[at + 1 : at + 6])
        assert all(score.reason for score in scores[at + 1 : at + 6])
        assert scores[at + 5].reason == "a double underscore"
