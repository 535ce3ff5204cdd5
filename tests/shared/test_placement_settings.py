"""What placement does not support is refused, with the setting to change."""

from pathlib import Path

import pytest

from penstock.services.up.plan import services
from penstock.shared.errors import SettingsError
from penstock.shared.placement.devices import devices_of
from penstock.shared.settings import loads

SHARED = 'placement.mode = "shared"\nrollout.engine = "transformers"\n'
VLLM = 'placement.mode = "shared"\nrollout.engine = "vllm"\n'
MODEL = 'reward.scorers = [{kind = "model", model = "m"}]\n'
TWO = "rollout.vllm.tensor_parallel_size = 2"
SPAN = 'rollout.nodes = 2\nrollout.rendezvous = "a:1"\nrollout.secret_file = "s"'
REFUSED = [
    ('placement.mode = "lend"', "placement.mode: expected 'separate' or 'shared', found 'lend': change placement.mode"),
    (SHARED + 'trainer.nodes = 2\ntrainer.rendezvous = "a:1"', 'expected trainer.nodes = 1 with placement.mode = "shared"'),
    (VLLM + TWO + "\ntrainer.ranks = 3", "where a replica shares the devices of 2 ranks, found 3: change one of them"),
    (VLLM + TWO + "\ntrainer.ranks = 4\nrollout.replicas = 4", 'expected rollout.replicas = 2 with placement.mode = "shared"'),
    (VLLM + TWO + "\ntrainer.ranks = 2\nrollout.engines_per_gpu = 2", "expected rollout.engines_per_gpu = 1 with"),
    (VLLM + TWO + '\ntrainer.ranks = 2\n' + SPAN, 'expected rollout.nodes = 1 with placement.mode = "shared"'),
    (VLLM + 'run.device = "cpu"\nplacement.rung = 1', "expected placement.rung = 0 for vLLM on a CPU, found 1"),
    (VLLM + 'run.device = "cpu"', 'expected placement.rung = 0 for vLLM on a CPU, found "auto"'),
    (VLLM + 'weights.shadow = "full"', 'expected weights.shadow = "auto" or "bucketed" with placement.mode = "shared"'),
    ('placement.mode = "shared"\nrollout.engine = "scripted"', 'expected the engine "vllm" or "transformers"'),
    (SHARED + "rollout.replicas = 2", 'expected rollout.replicas = 1 with placement.mode = "shared", where rank i and replica i'),
    (SHARED + 'weights.update = "drain"', 'expected weights.update = "inflight"'),
    (SHARED + "trainer.gpus = [3]\nrollout.gpus = [4]", "expected rollout.gpus = [3]"),
    (SHARED + MODEL + "reward.replicas = 2", 'expected reward.replicas = 1 with placement.mode = "shared" and models'),
    (SHARED + 'run.deterministic = "run"\nalgorithm.max_lag = 0', 'expected placement.rung = 0 with run.deterministic = "run"'),
]  # fmt: skip


@pytest.mark.parametrize(("text", "sentence"), REFUSED)
def test_what_is_not_supported_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(SettingsError) as caught:
        loads(text, "run.toml")
    assert sentence in str(caught.value)


@pytest.mark.parametrize("engines", ["2", "4", '"auto"'])
def test_a_replica_may_have_several_engines_on_its_shared_gpu(engines: str) -> None:
    assert loads(f"{VLLM}rollout.engines_per_gpu = {engines}", "run.toml").shared_devices


def test_replica_i_sees_the_gpu_of_rank_i() -> None:
    text = SHARED + 'trainer.ranks = 2\nrollout.replicas = 2\ntrainer.gpus = [3, 5]\nrun.id = "a"'
    plans = services(loads(text, "run.toml"), Path("run.toml"), "redis://x", {})
    shown = {plan.name: plan.environment.get("CUDA_VISIBLE_DEVICES") for plan in plans}
    assert (shown["trainer-0"], shown["rollout-0"], shown["rollout-1"]) == ("3,5", "3", "5")


@pytest.mark.parametrize("visible", ["6,2", "GPU-a, GPU-b"])
def test_gpus_are_numbered_among_those_that_the_run_sees(visible: str) -> None:
    text = 'trainer.gpus = [0]\nrollout.gpus = [1]\nrun.id = "a"'
    plans = services(loads(text, "run.toml"), Path("run.toml"), "redis://x", {"CUDA_VISIBLE_DEVICES": visible})
    shown = {plan.name: plan.environment.get("CUDA_VISIBLE_DEVICES") for plan in plans}
    first, second = visible.replace(" ", "").split(",")
    assert (shown["trainer-0"], shown["rollout-0"], shown["coordinator-0"]) == (first, second, visible)


@pytest.mark.parametrize(("visible", "number"), [("6", 1), ("", 0)])
def test_a_number_beyond_the_gpus_that_the_run_sees_is_refused(visible: str, number: int) -> None:
    text = f'trainer.gpus = [0]\nrollout.gpus = [{number}]\nrun.id = "a"'
    with pytest.raises(SettingsError, match=rf"CUDA_VISIBLE_DEVICES={visible}, found {number}: change them, or unset"):
        services(loads(text, "run.toml"), Path("run.toml"), "redis://x", {"CUDA_VISIBLE_DEVICES": visible})
    on_cpu = loads(text + '\nrun.device = "cpu"', "run.toml")
    assert services(on_cpu, Path("run.toml"), "redis://x", {"CUDA_VISIBLE_DEVICES": visible})


def test_a_tensor_parallel_replica_sees_the_gpus_of_its_ranks() -> None:
    text = VLLM + TWO + '\ntrainer.ranks = 4\nrollout.replicas = 2\ntrainer.gpus = [3, 5, 6, 7]\nrun.id = "a"'
    plans = services(loads(text, "run.toml"), Path("run.toml"), "redis://x", {})
    shown = {plan.name: plan.environment.get("CUDA_VISIBLE_DEVICES") for plan in plans}
    assert (shown["trainer-0"], shown["rollout-0"], shown["rollout-1"]) == ("3,5,6,7", "3,5", "6,7")


@pytest.mark.parametrize(
    ("text", "in_turns"),
    [
        (MODEL, True),
        ('algorithm = {reference = "reward", kl = {coefficient = 0.1}}', True),
        ('algorithm.distillation = 1.0\nreward.teachers = [{name = "a", model = "m"}]', True),
        ('algorithm.distillation = 1.0\nreward.teachers = [{name = "a", model = "m", url = "http://a"}]', False),
        ("", False),
        (MODEL + 'reward.models.device = "cpu"', False),
        (MODEL + "reward.gpus = [7]", False),
        (MODEL + 'reward.models.device = "cuda:0"\nreward.replicas = 2', False),
    ],
)
def test_models_take_turns_unless_they_have_a_device_of_their_own(text: str, *, in_turns: bool) -> None:
    settings = loads(SHARED + 'trainer.gpus = [5]\nrun.id = "a"\n' + text, "run.toml")
    assert settings.scores_in_turns == in_turns
    (plan, *_) = [plan for plan in services(settings, Path("run.toml"), "redis://x", {}) if plan.service == "reward"]
    own = ",".join(map(str, settings.reward.gpus)) or None
    assert plan.environment.get("CUDA_VISIBLE_DEVICES") == ("5" if in_turns else own)
    assert not loads(text, "run.toml").scores_in_turns


def test_a_replica_shares_the_device_of_its_rank_where_the_mode_says_so() -> None:
    names = ("rollout-0", "rollout-1", "rollout-2", "rollout", "rollout--1", "rollout-01", "trainer-0", "reward-0")
    shared = loads(SHARED + "trainer.ranks = 2\nrollout.replicas = 2", "run.toml")
    assert [devices_of(shared, "rollout", name) for name in names] == [(0,), (1,), *[()] * 6]
    assert (devices_of(shared, "trainer", "a"), devices_of(shared, "reward", "reward-0")) == ((0, 1), ())
    scoring = loads(SHARED + MODEL, "run.toml")
    assert [devices_of(scoring, "reward", name) for name in ("reward-0", "reward-1")] == [(0,), ()]
    assert not any(
        devices_of(loads("", "run.toml"), service, f"{service}-0") for service in ("rollout", "reward", "trainer")
    )
