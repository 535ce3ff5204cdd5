"""Laws of the [algorithm] table: presets, precedence, refusals."""

from pathlib import Path
from typing import Any, get_args

import pytest

from penstock.shared.errors import SettingsError
from penstock.shared.settings import Settings, dump, load
from penstock.shared.settings.algorithm import PRESETS, AlgorithmSettings, Preset


def algorithm(**values: Any) -> AlgorithmSettings:
    return Settings.model_validate({"algorithm": values}).algorithm


def test_without_a_preset_the_rule_is_grpo_with_a_clipped_ratio_against_behavior() -> None:
    collected = algorithm()
    assert (collected.preset, collected.advantage, collected.loss, collected.proximal) == (
        "grpo",
        "grpo",
        "clip",
        "behavior",
    )
    assert (collected.clip, collected.aggregation, collected.correction) == ((0.2, 0.2), "token", "ratio")
    assert (collected.epochs, collected.minibatches, collected.kl.coefficient, collected.dynamic_sampling) == (
        1,
        1,
        0.0,
        False,
    )
    assert not collected.needs_reference
    assert not collected.needs_critic


@pytest.mark.parametrize("preset", get_args(Preset))
def test_every_preset_holds_with_a_lag_and_sets_what_its_table_says(preset: str) -> None:
    actual = algorithm(preset=preset, max_lag=4)
    for name, value in PRESETS[preset].items():  # type: ignore[index]
        assert getattr(actual, name) == value


def test_an_explicit_key_wins_over_the_preset() -> None:
    actual = algorithm(preset="dapo", clip=[0.2, 0.3])
    assert (actual.clip, actual.dynamic_sampling) == ((0.2, 0.3), True)


def test_a_resolved_preset_is_the_same_when_it_is_read_again(tmp_path: Path) -> None:
    settings = Settings.model_validate({"algorithm": {"preset": "ppo", "critic": {"learning_rate": 3e-4}}})
    dump(settings, tmp_path / "resolved.toml")
    assert load(tmp_path / "resolved.toml", environment={}).algorithm == settings.algorithm


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"proximal": "recomputed", "correction": "none"},
         'expected an off-policy correction with algorithm.max_lag = 1, found correction = "none": set algorithm.correction'),
        ({"correction": "token_tis"},
         'expected algorithm.correction = "ratio" with algorithm.loss = "clip", found "token_tis": the ratio starts from behavior'),
        ({"proximal": "recomputed"}, 'the ratio starts from proximal logprobs and corrects nothing: set algorithm.correction = "token_tis"'),
        ({"loss": "policy_gradient"}, 'which has no ratio, found "ratio": set algorithm.correction = "token_tis"'),
        ({"loss": "policy_gradient", "correction": "none", "max_lag": 0, "epochs": 2}, "expected a correction where a batch is used for several updates"),
        ({"loss": "policy_gradient", "correction": "token_tis", "proximal": "recomputed"}, "algorithm.proximal to be left out with algorithm.loss = \"policy_gradient\", which has nothing to clip"),
        ({"loss": "dpo"}, 'expected algorithm.correction = "none" with algorithm.loss = "dpo"'),
        ({"preset": "dpo", "kl": {"coefficient": 0.1}}, "whose reference holds the policy by algorithm.dpo_beta"),
        ({"preset": "dpo", "advantage": "gae"}, 'expected algorithm.advantage to be left out with algorithm.loss = "dpo"'),
        ({"loss": "gspo", "clip": [0.2, 0.2, 3.0]}, 'algorithm.clip.2 to be left out with algorithm.loss = "gspo"'),
        ({"clip": [0.2, 0.2, 0.5]}, "greater than 1"),
        ({"dual_clip": 0.5}, "algorithm.dual_clip no longer exists: use a third number in algorithm.clip"),
        ({"preset": "ppo", "dynamic_sampling": True}, 'expected algorithm.dynamic_sampling to be left out with algorithm.advantage = "gae", which learns from groups with equal'),
        ({"groups_per_step": 9, "minibatches": 2}, "expected algorithm.groups_per_step to be a multiple of minibatches, found 9 and 2"),
        ({"preset": "icepop", "correction_band": [1.5, 5]}, "expected algorithm.correction_band to contain the ratio 1, found [1.5, 5]"),
        ({"kl": {"target": 0.1}}, "algorithm.kl.target no longer exists: use algorithm.kl.coefficient"),
        ({"preset": "grbo"}, "algorithm.preset: expected 'grpo', 'dr_grpo'"),
        ({"kl": {"coeficient": 1}}, "did you mean 'coefficient'?"),
    ],
)  # fmt: skip
def test_contradictions_are_refused_with_advice(tmp_path: Path, values: dict[str, Any], sentence: str) -> None:
    import tomli_w

    (tmp_path / "run.toml").write_text(tomli_w.dumps({"algorithm": values}))
    with pytest.raises(SettingsError) as caught:
        load(tmp_path / "run.toml", environment={})
    assert sentence in str(caught.value)


def test_an_uncorrected_run_needs_a_word_or_no_lag() -> None:
    algorithm(proximal="recomputed", correction="none", max_lag=0)
    algorithm(proximal="recomputed", correction="ignored", max_lag=4)


def test_a_critic_that_only_warms_up_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected algorithm.critic.warmup_steps < run.steps, found 5 and 5"):
        Settings.model_validate({"run": {"steps": 5}, "algorithm": {"preset": "ppo", "critic": {"warmup_steps": 5}}})


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo", "my_package.advantages:mine"])
def test_a_penalty_in_the_reward_of_a_whole_sample_is_not_masked(advantage: str) -> None:
    penalised = {"advantage": advantage, "kl": {"coefficient": 0.1, "estimator": "k1"}}
    assert algorithm(**penalised).compares_whole_samples
    assert not algorithm(advantage=advantage).compares_whole_samples
    with pytest.raises(ValueError, match=f'expected another algorithm.on_stale than "mask" with .*"{advantage}"'):
        algorithm(**penalised, on_stale="mask")


@pytest.mark.parametrize("tokens", [131_072, "131072"])
def test_defaults_of_long_completions_are_those_that_they_can_meet(tokens: object) -> None:
    long = {"sampling": {"max_new_tokens": tokens}}
    of = Settings.model_validate({**long, "episodes": {"executor": "stdlib"}})
    needed_s = 131_072 * 0.05
    assert (of.evaluation.timeout_s, of.episodes.deadline_s, of.internal.stale_wait_s) == (needed_s,) * 3
    assert (of.guards.limit("stalled"), of.guards.limit("lag")) == (needed_s, 0.25)
    assert of.algorithm.on_stale == "mask"
    given = {"evaluation": {"timeout_s": 60}, "algorithm": {"on_stale": "wait"}, "guards": {"limits": {"stalled": 9}}}
    of = Settings.model_validate({**long, **given})
    assert (of.evaluation.timeout_s, of.algorithm.on_stale, of.guards.limit("stalled")) == (60, "wait", 9)
    assert Settings.model_validate({**long, "algorithm": {"preset": "dpo"}}).algorithm.on_stale == "drop"
    plain, short = Settings(), Settings.model_validate({"sampling": {"max_new_tokens": 8_191}})
    assert short.model_dump(exclude={"sampling"}) == plain.model_dump(exclude={"sampling"})


def test_a_table_of_episodes_without_a_player_gets_no_deadline_that_nobody_set() -> None:
    long = {"sampling": {"max_new_tokens": 131_072}}
    plain = Settings.model_validate({**long, "episodes": {"max_turns": 8}})
    assert plain.episodes.deadline_s == Settings().episodes.deadline_s
