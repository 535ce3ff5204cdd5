"""A run from Python, without its processes."""

import http.server
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.shared.settings import dump, load
from tests.support.http_server import served

ROOT = Path(__file__).parents[2]
METRICS = {"samples": 4, "finished_at_s": 1.5, "lag_counts": {"0": 4}}


def recorded(folder: Path, *steps: int, first: int = 1) -> None:
    lines = [
        {"entry": f"{place}-0", "step": step, "version": place, **METRICS, "reward_mean": None if step == 2 else 0.5}
        for place, step in enumerate(steps, first)
    ]
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(f"{json.dumps(line)}\n" for line in lines)


def coordinator(*states: str, pages: Sequence[Sequence[int]] = ()) -> type[http.server.BaseHTTPRequestHandler]:
    """Answer one state, or one page of steps, after the other; "" and an empty page, and what follows, break off."""
    runs = iter([{"run_id": "theirs", "state": state, "step": 9, "steps": 9} if state else None for state in states])
    steps = iter([[row_of(step) for step in page] for page in pages])

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.startswith("/v1/run/steps"):
                rows = next(steps, None)
                answer: object = {"items": rows, "next": None} if rows else None
            else:
                answer = next(runs, None)
            if answer is not None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    return Handler


def row_of(step: int) -> dict[str, Any]:
    return {"id": f"{step}-0", "step": step, "version": step, **METRICS, "metrics": {"reward_mean": step / 2}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    settings = load(ROOT / "config/arithmetic.toml", ["--run.id=mine", f"--run.folder={tmp_path}"], environment={})
    (tmp_path / "mine").mkdir()
    dump(settings, tmp_path / "mine" / "settings.toml")
    return tmp_path / "mine"


def test_the_steps_of_a_run_that_has_ended_come_from_its_files_once_each(folder: Path) -> None:
    recorded(folder, 1, 2, 3, 2, 3)
    steps = list(penstock.Run.open(folder).steps())
    assert [(step.step, step.version) for step in steps] == [(1, 1), (2, 2), (3, 3), (2, 4), (3, 5)]
    assert steps[0] == penstock.Step(1, 1, 4, 1.5, {"reward_mean": 0.5})
    assert str(steps[1].metrics["reward_mean"]) == "nan"


def test_settings_are_a_file_or_a_dict_with_changes_and_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tables = {"run": {"id": "x", "steps": 9}, "data.path": {"a.jsonl": 1.0, "b.jsonl": 2.0}}
    run = penstock.Run(tables, {"run.steps": 5, "policy.model": Path("model"), "run.folder": tmp_path})
    assert run.folder == tmp_path / "x"
    path = tmp_path / "run.toml"
    path.write_text('run.steps = 9\nevaluation.path = "x.jsonl"\n')
    named = penstock.Run(path, {"evaluation.path": None, "run.folder": "elsewhere"})
    assert named.folder.parent == tmp_path / "elsewhere"
    assert named.folder.name.startswith("run-")
    assert not (tmp_path / "elsewhere").exists(), "nothing is written before the start"


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: penstock.Run("none.toml"), "no settings file at none.toml: check the path, or give the settings as a"),
        (lambda: penstock.Run({"run.stepz": 3}), "did you mean 'steps'?"),
        (lambda: penstock.Run({}, {"run.steps": 0}), "change run.steps"),
        (lambda: penstock.Run.open("nowhere"), "no run's folder or settings file at nowhere"),
    ],
)
def test_wrong_settings_are_a_sentence(make: Callable[[], penstock.Run], sentence: str) -> None:
    with pytest.raises(penstock.SettingsError) as refused:
        make()
    assert sentence in str(refused.value)


def test_a_run_that_up_refuses_is_the_sentence_of_up(tmp_path: Path) -> None:
    run = penstock.Run({"run": {"folder": tmp_path, "id": "x"}, "policy.model": "no/folder", "data.path": "none.jsonl"})
    with pytest.raises(penstock.SettingsError, match=r"change policy\.model"):
        run.start()
    run.close()


def test_a_run_that_is_not_running_says_so(folder: Path) -> None:
    with pytest.raises(penstock.PenstockError, match="has no coordinator: it is starting, or was interrupted"):
        penstock.Run.open(folder).pause()


def test_a_run_whose_coordinator_leaves_once_it_has_said_the_end_has_ended(folder: Path) -> None:
    recorded(folder, 1, 2)
    with served(coordinator("finished")) as url:
        (folder / "coordinator.json").write_text(json.dumps({"url": url}))
        assert [step.step for step in penstock.Run.open(folder).steps()] == [1, 2]


def test_the_wait_for_a_run_that_has_ended_is_over_and_one_for_an_interrupted_run_says_so(folder: Path) -> None:
    (folder / "summary.json").write_text(json.dumps({"run_id": "mine", "state": "stopped", "steps": 2}))
    run = penstock.Run.open(folder)
    seen = run.wait()
    assert run.status() == seen
    assert (seen.run_id, seen.state, seen.step, seen.ended) == ("mine", "stopped", 2, True)
    (folder / "summary.json").write_text(json.dumps({"run_id": "mine", "state": "finished", "steps": 2}))
    with pytest.raises(penstock.PenstockError, match="it is starting, or was interrupted"):  # it is being extended
        penstock.Run.open(folder).wait()


def test_a_run_that_is_known_by_its_address_takes_nothing_from_the_folder_in_which_the_script_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (folder / "summary.json").write_text(json.dumps({"run_id": "mine", "state": "stopped", "steps": 2}))
    with served(coordinator("running", "running", "", "finished")) as url:
        run = penstock.Run.connect(url)
        seen = run.wait()
    assert (seen.run_id, seen.state, seen.step) == ("theirs", "finished", 9)
    for ask in (lambda: run.settings, run.start, run.export, run.stored_policy):
        with pytest.raises(penstock.PenstockError, match="the run's folder is not known by the address"):
            ask()


def test_steps_are_followed_through_restarts_of_the_coordinator() -> None:
    states = ("running", "running", "running", "", "running", "running", "", "finished")
    with served(coordinator(*states, pages=[[1], [], [2, 1], [3, 2, 1]])) as url:
        assert [step.step for step in penstock.Run.connect(url).steps()] == [1, 2, 3]


def test_a_coordinator_that_has_left_for_good_is_awaited_for_the_named_time_only() -> None:
    gone = pytest.raises(penstock.PenstockError, match="has not answered for 0 s: no coordinator answers at")
    with served(coordinator("running", "running")) as url:
        run = penstock.Run.connect(url)
        with gone:
            run.wait(silence_s=0.0)
    with served(coordinator("running", "running", "running", pages=[[1]])) as url:
        steps = penstock.Run.connect(url).steps(silence_s=0.0)
        assert next(steps).step == 1
        with gone:
            next(steps)


def test_steps_and_answers_are_those_of_the_api(folder: Path) -> None:
    asked: list[Any] = []
    rows = [row_of(step) for step in (1, 2, 3)]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.startswith("/v1/run/steps"):
                self.answer({"items": rows[:0:-1], "next": "2-0"} if "cursor" not in self.path else page_2)
            else:
                self.answer({"run_id": "mine", "state": "finished", "step": 3, "steps": 3, "closed": True, "head": 3})

        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            of = {"tokens": 2, "finish_reason": "stop", "versions": [3]}
            self.answer({"replica": "rollout-0", "prompt_tokens": 6, "completions": [{"text": "46", **of}]})

        def answer(self, body: object) -> None:
            content = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    page_2 = {"items": rows[:1], "next": None}
    with served(Handler) as url:
        run = penstock.Run.connect(url)
        assert [step.step for step in run.steps()] == [1, 2, 3]
        assert run.policy.generate("12+34=") == [penstock.Completion("46", 2, "stop", (3,))]
        run.policy.generate([{"role": "user", "content": "hi"}], samples=2, temperature=0.0)
        assert (run.policy.version, run.wait().state) == (3, "finished")
    unset = {"max_new_tokens": None}
    assert asked == [
        {"prompt": "12+34=", "samples": 1, "temperature": None, **unset},
        {"messages": [{"role": "user", "content": "hi"}], "samples": 2, "temperature": 0.0, **unset},
    ]
