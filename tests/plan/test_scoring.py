"""Laws of what penstock plan says of reward models, references and teachers in the reward service."""

import json
from pathlib import Path

import pytest
import tomli_w

from penstock.services.cli.plan import make
from penstock.services.plan.files import chart_values, run_values, write
from penstock.services.plan.memory import peak, scoring_memory, total
from penstock.services.plan.report import Plan, text
from penstock.services.plan.shapes import SHAPES
from penstock.shared.settings import Settings, loads

SCORER = '[[reward.scorers]]\nkind = "model"\nname = "quality"\nmodel = "{}"\n'


def folder(place: Path, shape: str = "7b") -> Path:
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(json.dumps(dict(SHAPES[shape])))
    return place


def scored(model: Path | str, more: str = "") -> Settings:
    return loads(f'{more}\nreward.expression = "quality"\n{SCORER.format(model)}', "run.toml")


def planned(settings: Settings, gpus: str) -> Plan:
    return make(settings, gpus, "1.5b")


def test_models_that_take_turns_have_a_phase_on_the_shared_gpus_and_cost_their_time(tmp_path: Path) -> None:
    with_model = planned(scored(folder(tmp_path / "reward")), "2xH200")
    without = planned(loads("", "run.toml"), "2xH200")
    (turns,) = [each for each in with_model.candidates if each.layout.placement == "shared"][:1]
    (plain,) = [each for each in without.candidates if each.layout.placement == "shared"][:1]
    table = turns.memory["shared"]
    (models,) = [part for part in table["score"] if part.name == "scoring models"]
    assert models.nbytes == pytest.approx(2 * (7.07e9), rel=0.02), "without an output layer of 152,064 words"
    assert peak(table) <= with_model.planner.limit_bytes
    assert (turns.layout.gpus, turns.layout.scoring) == (2, 0)
    tokens = turns.layout.gpus and with_model.planner.work.step_tokens
    assert (
        turns.rates.step(tokens)
        > plain.rates.step(tokens) + models.nbytes / with_model.planner.cluster.host_bytes_per_s
    )
    written = loads(
        tomli_w.dumps(run_values(scored(tmp_path / "reward"), turns, with_model.planner.cluster)), "run.toml"
    )
    assert written.scores_in_turns


@pytest.mark.parametrize("gpus", ["4xH200", "2x8xH200"])
def test_elsewhere_they_have_a_gpu_of_their_own(tmp_path: Path, gpus: str) -> None:
    settings = scored(folder(tmp_path / "reward"), 'reward.models.device = "cuda:1"')
    plan = planned(settings, gpus)
    (best, *_) = [each for each in plan.candidates if each.layout.placement == "separate"]
    assert best.layout.scoring == 1
    assert total(best.memory["reward"]["score"]) == total(scoring_memory(plan.planner.work))
    assert "reward models on 1" in best.layout.words
    assert chart_values(best, plan.planner.cluster)["reward"]["gpu"]["count"] == 1
    if plan.planner.cluster.nodes == 1:
        written = loads(tomli_w.dumps(run_values(settings, best, plan.planner.cluster)), "run.toml")
        assert written.reward.models.device == "auto"
        used = [*written.trainer.gpus, *written.rollout.gpus, *written.reward.gpus]
        assert sorted(used) == list(range(best.layout.gpus)) == list(range(4))


def test_what_has_no_gpu_left_is_said_and_what_the_settings_refuse_is_not_written(tmp_path: Path) -> None:
    model = folder(tmp_path / "reward")
    plan = planned(scored(model, "reward.replicas = 2\nreward.gpus = [0, 1]"), "1xH200")
    assert not plan.candidates
    assert "Reward models need a GPU of their own" in text(plan)
    two = scored(model, "reward.replicas = 2")
    assert not planned(two, "1xH200").candidates, "two services take no turns"
    plan = planned(scored(model, 'weights.update = "drain"'), "4xH200")
    run, _ = write(scored(model, 'weights.update = "drain"'), plan.candidates, plan.planner, tmp_path / "out")
    assert loads(run.read_text(), "run.toml").placement.mode == "separate"


def test_models_on_the_host_are_not_counted_and_those_without_sizes_are_named(tmp_path: Path) -> None:
    on_host = planned(scored(folder(tmp_path / "reward"), 'reward.models.device = "cpu"'), "2xH200")
    assert on_host.planner.work.scoring == ()
    unknown = planned(scored("nobody/knows"), "2xH200")
    assert unknown.candidates
    assert "Not counted, as no config.json of it is here: model of scorer 'quality' in [[reward.scorers]]." in text(
        unknown
    )


def test_a_reference_in_the_reward_service_is_counted_with_its_logits(tmp_path: Path) -> None:
    settings = loads('algorithm.reference = "reward"\nalgorithm.kl.coefficient = 0.1', "run.toml")
    plan = planned(settings, "2xH200")
    (reference,) = plan.planner.work.scoring
    assert reference.has_logits
    assert reference.nbytes == plan.planner.work.policy_bytes
    assert not plan.planner.work.reference


def test_models_that_fit_on_no_gpu_are_refused_with_the_setting_that_helps(tmp_path: Path) -> None:
    plan = planned(scored(folder(tmp_path / "reward", "70b")), "4xL4")
    assert not plan.candidates
    assert "the reward service's models" in text(plan)
    assert 'set reward.models.device = "cpu"' in text(plan)
