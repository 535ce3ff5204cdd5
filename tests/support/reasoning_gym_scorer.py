"""reasoning-gym's graders as a user's function: the row names the task and has its entry."""

from penstock.shared.bus.messages import Prompt, Sample


def score(sample: Sample, prompt: Prompt) -> float:
    import reasoning_gym

    grader = reasoning_gym.create_dataset(str(prompt.extra["task"]), size=1)
    return float(grader.score_answer(sample.text, prompt.extra["entry"]))
