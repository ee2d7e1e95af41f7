"""Warning about an agent that learns nothing: a run so short that its controller never makes a round of updates."""

from __future__ import annotations

from typing import Any

from dptune.mechanisms.agents.rl import LearnedControl
from dptune.mechanisms.mechanism import Mechanism


def learner(mechanism: Mechanism) -> Any:
    """The controller (``LearnedControl``) whose agent is to learn inside the run; None without one.

    An agent that is random, or was trained before and stays as it is, is none: its own options say so.
    """
    controller = mechanism.controller
    learns = isinstance(controller, LearnedControl) and (controller.policy, controller.agent_kind) == ("learned", "sac")
    return controller if learns else None


def idle_agent(mechanism: Mechanism, steps: int) -> str | None:
    """A warning where the mechanism's agent would make no update in a run of ``steps`` releases; None where it does.

    An agent acts, and learns from its second action on. All of this is public.
    """
    controller = learner(mechanism)
    if controller is None or controller.planned_updates(steps):
        return None
    none = f"the agent of {mechanism.name} makes no update"
    if not controller.rounds:
        return f"{none}: its rounds are 0. Fix: set rounds to 1 or more, or policy to random"
    second = controller.first_action + controller.interval
    return (
        f"{none} in {steps} steps (at most 1 action, 0 rounds): it learns from its second action on, which comes at "
        f"step {second} with warmup {controller.warmup} and interval {controller.interval}. Fix: train for {second} "
        "steps or more (by epochs, say), or lower warmup or interval"
    )


def learning_of(mechanism: Mechanism, steps: int) -> dict[str, int]:
    """What the agent of a finished run did, and was to do in ``steps`` releases; empty without one that learns.

    ``actions`` and ``updates`` (rounds of SAC) were made; ``planned_updates`` follow from the public schedule.
    """
    controller = learner(mechanism)
    if controller is None:
        return {}
    planned = controller.planned_updates(steps)
    return {"actions": controller.actions, "updates": controller.updates, "planned_updates": planned}
