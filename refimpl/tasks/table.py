"""All tasks by name. Adding one is a generator, a verifier and a line here."""

from __future__ import annotations

import importlib

from refimpl.tasks import arithmetic, code, strict_json
from refimpl.tasks.gym import PREFIX, gym_task
from refimpl.tasks.problem import Task

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            name="addition",
            generate=arithmetic.addition,
            verify=arithmetic.exactly,
            levels=4,
            solved_at=1.0,
            solved_means="the answer is the sum and nothing else",
            chat=False,
        ),
        Task(
            name="sorting",
            generate=arithmetic.sorting,
            verify=arithmetic.exactly,
            levels=8,
            solved_at=1.0,
            solved_means="the answer is the sorted digits and nothing else",
            chat=False,
        ),
        Task(
            name="sums",
            generate=arithmetic.sums,
            verify=arithmetic.last_number,
            levels=6,
            solved_at=1.0,
            solved_means="the last number of the answer is the sum",
        ),
        Task(
            name="json",
            generate=strict_json.record,
            verify=strict_json.verify,
            levels=7,
            solved_at=1.0,
            solved_means="the answer is strict JSON, obeys the schema and states the facts",
        ),
        Task(
            name="code",
            generate=code.chain,
            verify=code.verify,
            levels=6,
            solved_at=1.0,
            solved_means="the program returns the right value, of the right type, in all cases",
            runs_code=True,
        ),
    )
}


def find_task(name: str) -> Task:
    """The task of that name: ours, `gym/NAME` of reasoning-gym, or `module:ATTRIBUTE`, a `Task` of the user's own whose
    name is the same. Raises ValueError that lists the known ones. Names come from settings, never from a stranger.
    """
    if name.startswith(PREFIX):
        return gym_task(name.removeprefix(PREFIX))
    module, colon, attribute = name.partition(":")
    if colon:
        task = getattr(importlib.import_module(module), attribute, None)
        if not isinstance(task, Task) or task.name != name:
            raise ValueError(f"{attribute} of module {module} is no Task with the name {name!r}")
        return task
    if name not in TASKS:
        raise ValueError(f"task {name!r} is unknown, expected one of {sorted(TASKS)}, {PREFIX}NAME or module:ATTRIBUTE")
    return TASKS[name]
