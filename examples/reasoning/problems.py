"""Write the problems of this example, or of any other task of `reasoning-gym` (0.1.25, which needs a C compiler).

pip install reasoning-gym
python examples/reasoning/problems.py
python examples/reasoning/problems.py letter_counting min_words=3 max_words=8
"""

import argparse
import json
import random
from pathlib import Path

import reasoning_gym

HERE = Path(__file__).parent
TRAIN, HELDOUT = 3000, 400
TASKS = {
    "chain_sum": {"min_terms": 3, "max_terms": 4, "min_digits": 1, "max_digits": 1},
    "simple_equations": {"min_terms": 2, "max_terms": 2, "min_value": 1, "max_value": 10},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", nargs="?")
    parser.add_argument("options", nargs="*", help="the task's own settings, name=value")
    arguments = parser.parse_args()
    options = {name: json.loads(value) for name, _, value in (word.partition("=") for word in arguments.options)}
    for task, told in {arguments.task: options}.items() if arguments.task else TASKS.items():
        write(task, told)


def write(task: str, options: dict[str, int]) -> None:
    """Write problems with different questions, in a random order."""
    dataset = reasoning_gym.create_dataset(task, size=2 * (TRAIN + HELDOUT), seed=0, **options)
    answers = {entry["question"]: entry["answer"] for entry in dataset}
    rows = [json.dumps({"messages": [{"role": "user", "content": q}], "answer": a}) + "\n" for q, a in answers.items()]
    random.Random(0).shuffle(rows)
    for name, part in (("heldout", rows[:HELDOUT]), ("train", rows[HELDOUT : HELDOUT + TRAIN])):
        (HERE / f"{task}-{name}.jsonl").write_text("".join(part), encoding="utf-8")
        print(f"{task}-{name}.jsonl: {len(part)} problems")


if __name__ == "__main__":
    main()
