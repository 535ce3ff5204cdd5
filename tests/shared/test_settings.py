"""Laws of the settings: sources and errors."""

import re
from pathlib import Path

import pytest
import tomli_w

from penstock.services.cli import settings_help
from penstock.shared.errors import SettingsError
from penstock.shared.settings import Settings, dump, dumps, load, loads
from penstock.shared.settings.reading.replaced import REPLACED

ROOT = Path(__file__).parents[2]


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def test_flags_come_before_the_environment_and_that_before_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "[trainer]\nranks = 1\nlearning_rate = 1e-3\nwarmup_steps = 3\n")
    environment = {"PENSTOCK__TRAINER__RANKS": "2", "PENSTOCK__TRAINER__LEARNING_RATE": "2e-3", "OTHER": "x"}
    trainer = load(path, ["--trainer.ranks", "4"], environment).trainer
    assert (trainer.ranks, trainer.learning_rate, trainer.warmup_steps) == (4, 2e-3, 3)


def test_a_clusters_file_is_refused_with_the_command_that_takes_it() -> None:
    with pytest.raises(
        SettingsError, match=r"cluster\.toml says where runs are deployed: .* `penstock deploy RUN\.toml --on`$"
    ):
        load(ROOT / "config" / "cluster.toml", [], {})


@pytest.mark.parametrize("flags", [["--evaluation.path", ""], ["--evaluation.path="], ["--evaluation.path={}"]])
def test_an_empty_value_removes_the_held_out_set_of_the_file(flags: list[str], tmp_path: Path) -> None:
    path = write(tmp_path, '[evaluation]\npath = "heldout.jsonl"\n[data]\nsystem = "Think."\n')
    settings = load(path, [*flags, "--data.system", ""], {})
    assert (settings.evaluation.held_out, settings.data.system) == ((), "")


def test_a_file_with_a_byte_order_mark_and_other_line_ends_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xef\xbb\xbf[run]\r\nsteps = 7\r\n")
    assert load(path, [], {}).run.steps == 7


@pytest.mark.parametrize(
    ("flag", "meant"),
    [("--ranks", "'trainer.ranks'"), ("--max_new_token", "'sampling.max_new_tokens'"), ("--group-sise", "'sampling.group_size'")],
)  # fmt: skip
def test_a_flag_without_a_table_is_refused_with_the_setting_that_is_meant(
    tmp_path: Path, flag: str, meant: str
) -> None:
    with pytest.raises(SettingsError, match=rf"found '{flag}'; did you mean {meant}\?$"):
        load(write(tmp_path, ""), [flag, "3"], {})


def test_a_flag_without_a_value_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"^expected a value after --run\.steps$"):
        load(write(tmp_path, ""), ["--run.steps"], {})


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[trainer]\nlearnin_rate = 1", "trainer.learnin_rate: expected a known setting, found 'learnin_rate'; did you mean 'learning_rate'?"),
        ("[weights]\nprobe_gap_nats = 0.4", "weights.probe_gap_nats no longer exists: use probe in guards.limits, a multiple of"),
        ('[algorithm.kl]\nestimator = "k1"\nwhere = "loss"', "algorithm.kl.where no longer exists: use algorithm.kl.estimator"),
        ("[guards]\nlimits = { probe = 0 }", "above 0 for probe, found probe = 0: change guards.limits"),
        ("[trainr]\nranks = 1", "trainr: expected a known setting, found 'trainr'; did you mean 'trainer'?"),
        ('[run]\nsteps = "many"', "run.steps: expected a valid integer, unable to parse string as an integer, found 'many': change run.steps"),
        ("[sampling]\ngroup_size = 1", "sampling.group_size: expected greater than or equal to 2, found 1: change sampling.group_size"),
        ("[trainer]\nranks = 99999999", "trainer.ranks: expected less than or equal to 1024, found 99999999: change trainer.ranks"),
        ("[rollout]\nreplicas = 99999999", "rollout.replicas: expected less than or equal to 1024, found 99999999: change rollout.replicas"),
        ("[sampling]\ntop_k = 1000", "sampling.top_k: expected less than or equal to 256, found 1000: change sampling.top_k"),
        ("[sampling]\ntop_k = 200\nmax_new_tokens = 65536", "expected at most 256 MiB of tokens that could be drawn in a group, found 800, 4 bytes for each of sampling.top_k = 200 tokens × 16 samples × 65536 tokens"),
        ("[sampling]\ntemperature = 0.005", "sampling.temperature: expected greater than or equal to 0.01, found 0.005: change sampling.temperature"),
        ('[evaluation]\npath = "a.jsonl"\ntemperature = 0.005', 'expected a temperature of 0 or at least 0.01 in the set "heldout", found 0.005'),
        ("[sampling]\nmin_new_tokens = 300", "expected sampling.min_new_tokens <= sampling.max_new_tokens, found 300 > 256"),
        ('[sampling]\ntop_p = 0.9\n[algorithm]\nkl.coefficient = 0.1\nreference = "reward"', 'expected algorithm.reference = "trainer" with top_p, top_k, min_p or min_new_tokens in [sampling], found "reward"'),
        ('[sampling.by_dataset]\n"b.jsonl" = { top_p = 0.9 }', "expected a dataset of data.path in sampling.by_dataset, found 'b.jsonl'; data.path has train.jsonl"),
        ('[sampling.by_dataset]\n"train.jsonl" = { group_size = 4 }', 'expected another setting in sampling.by_dataset."train.jsonl" than group_size'),
        ('[sampling.by_dataset]\n"train.jsonl" = { max_new_tokens = 300 }', 'expected max_new_tokens <= 256, that of [sampling], in sampling.by_dataset."train.jsonl", found 300'),
        ('[sampling.by_dataset]\n"train.jsonl" = { topp = 0.9 }', "topp"),
        ('[algorithm]\nloss = "clipp"', "expected 'clip', 'gspo', 'cispo', 'policy_gradient', 'dpo', 'cross_entropy' or an import path 'package.module:function', found 'clipp'"),
        ("[algorithm]\nmax_lag = -1", "algorithm.max_lag: expected greater than or equal to 0, found -1: change algorithm.max_lag"),
        ("[algorithm]\nmax_lag = 100000000", "expected at most 1,000,000 groups in flight"),
        ("[bus]\nshelf_bytes = 1", "bus.shelf_bytes = 1 has no effect with bus.shelve_above_bytes = 0: remove it"),
        ("[bus]\nshelf_bytes = 5", "bus.shelf_bytes = 5 has no effect with bus.shelve_above_bytes = 0: remove it"),
        ('[bus]\nshelve_above_bytes = 5\n[algorithm]\nloss = "cross_entropy"', "bus.shelve_above_bytes has no effect, as nothing is generated"),
        ('[bus]\nshelve_above_bytes = 5\n[run]\ndeterministic = "run"\n[algorithm]\nmax_lag = 0', "expected bus.shelve_above_bytes = 0 and trainer.router_replay = false with run.deterministic"),
        ('[bus]\nshelf_bytes = 5\n[trainer]\nrouter_replay = true\n[rollout]\nengine = "transformers"\n[run]\ndeterministic = "run"\n[algorithm]\nmax_lag = 0', "expected bus.shelve_above_bytes = 0 and trainer.router_replay = false with run.deterministic"),
        ("[run]\nsteps = 5\n[trainer]\nwarmup_steps = 6", "expected trainer.warmup_steps <= run.steps, found 6 > 5"),
        ('[[reward.scorers]]\nkind = "answer"\n[[reward.scorers]]\nkind = "answer"', "expected scorers with different names, found ['answer', 'answer']"),
        ('[weights]\nsnapshots = "sharded"\ntransport = "file"', 'expected weights.transport = "pull" and trainer.zero_stage >= 1 with weights.snapshots = "sharded", found "file" and 1'),
        ("[trainer]\nranks = 2\ngpus = [0]", "expected 2 different numbers in trainer.gpus, one for each of trainer.ranks, found [0]"),
        ("[reward]\nreplicas = 2\ngpus = [3]", "expected as many numbers in reward.gpus for each of 2 reward.replicas, found [3]"),
        ("[rollout]\nreplicas = 2\ngpus = [0, 1, 2]", "expected as many numbers in rollout.gpus for each of 2 rollout.replicas, found [0, 1, 2]"),
        ('[episodes]\nenvironment = "http://me:secret@host/"', "episodes.environment: expected text of the form"),
        ('[rollout]\nnodes = 2\nrendezvous = "a:1"', "expected rollout.rendezvous, rollout.secret_file and rollout.node < 2 with rollout.nodes = 2, found 'a:1', None and 0"),
        ("[rollout]\nnode = 1", "rollout.node < 1 with rollout.nodes = 1, found '', None and 1"),
        ('[rollout]\nnodes = 2\nnode = 2\nrendezvous = "a:1"\nsecret_file = "s"\nvllm.tensor_parallel_size = 2', "rollout.node < 2 with rollout.nodes = 2, found 'a:1', s and 2"),
        ('[rollout]\nnodes = 2\nrendezvous = "a:1"\nsecret_file = "s"\nvllm.tensor_parallel_size = 3', "expected rollout.vllm.tensor_parallel_size to be a multiple of rollout.nodes = 2, as many GPUs on each host, found 3"),
        ('[rollout]\nengine = "transformers"\nnodes = 2\nrendezvous = "a:1"\nsecret_file = "s"\nvllm.tensor_parallel_size = 2', 'expected rollout.nodes = 1 with the engine "transformers", found 2'),
        ("[run", "is not TOML: "),
        ('[guards]\noff = ["kl"]', "expected 'kl' in guards.pause or in guards.off, but it is in both"),
        ('[evaluation]\npath = "a.jsonl"\nsamples = { aime = 4 }', "expected the name of a set in evaluation.samples, found 'aime'; evaluation.path has heldout"),
        ('[evaluation]\npath = { aime = "a.jsonl" }\nsamples = 4', 'expected a temperature above 0 for 4 samples of each problem in the set "aime"'),
        ('[data]\npath = "hf://sums"', "expected hf://owner/name@revision:split, or hf://owner/name@revision:configuration/split, found 'hf://sums'"),
        ('[data]\nfilter = "level <"', "expected an expression in data.filter, found invalid syntax at character 8 of 'level <': change data.filter"),
        ('[data]\nchat_template = { tokenize = false }', "expected arguments of the chat template itself in data.chat_template, found 'tokenize', which Penstock sets: leave it out"),
        ('[evaluation.gate]\naction = "tell"', 'expected a held-out set with evaluation.gate.action = "tell", but there is none: set evaluation.path'),
        ('[[reward.scorers]]\nkind = "answer"\nextract = "choices"', "reward.scorers.0.extract: expected text of the form ^(whole|"),
        ('[[reward.scorers]]\nkind = "tlr"', "'verifiers', 'random', 'environment' as the kind, found 'tlr'; did you mean 'trl'?: change kind"),
        ('[[reward.scorers]]\nname = "mine"', "'verifiers', 'random', 'environment' as the kind, but it is not set: add kind"),
        ('[[reward.scorers]]\nkind = "answer"\nmod = "exact"', "reward.scorers.0.mod: expected a known setting, found 'mod'; did you mean 'mode'?"),
        ('[[reward.scorers]]\nkind = "model"', "reward.scorers.0.model: expected a value, but it is not set: add it"),
        ('[[reward.scorers]]\nkind = "trl"\nfunctions = "a:b"', "reward.scorers.0.functions: expected a list such as [\"a:b\"], found 'a:b'"),
        ("[algorithm]\nclip = 0.2", "algorithm.clip: expected a list such as [0.2, 0.2], found 0.2: change algorithm.clip"),
        ('[tracking]\nsinks = "wandb"', "tracking.sinks: expected a list such as [\"wandb\"], found 'wandb': change tracking.sinks"),
        ('[tracking]\nsinks = "[wandb]"', "tracking.sinks: expected a list, with quotes around it for the shell, found '[wandb]'"),
        ('[reward]\nscorers = "answer"', "reward.scorers: expected a list, found 'answer': change reward.scorers"),
        ("[data]\npath = 3", "data.path: expected text or a table, found 3: change data.path"),
        ("[algorithm]\nclip = [0.2]", "algorithm.clip: expected 2 or more items, found [0.2]: change algorithm.clip"),
        ("run = 3", "run: expected a table (run.id, run.folder, "),
        ("[rollout.vllm]\nmax_model_length = 4", "rollout.vllm.max_model_length: expected a known setting, found 'max_model_length'; did you mean 'max_model_len'?"),
        ("[rollout.vllm]\ngpu_memory_utilization = 1.5", "rollout.vllm.gpu_memory_utilization: expected less than or equal to 1, found 1.5: change rollout.vllm.gpu_memory_utilization"),
        ('[rollout]\nengine = "transformers"\nvllm.tensor_parallel_size = 2', 'expected rollout.vllm.tensor_parallel_size = 1 with the engine "transformers", found 2: change it, or set rollout.engine = "vllm"'),
        ('[rollout]\nengine = "transformers"\n[weights]\nkv = "recompute"', 'expected weights.kv = "keep" with the engine "transformers", found "recompute"'),
        ('[rollout]\nengine = "scripted"\n[weights]\nshadow = "bucketed"', 'expected weights.shadow = "full" with the engine "scripted", found "bucketed"'),
        ("[rollout]\nengines_per_gpu = 9", "rollout.engines_per_gpu: expected 'auto', 1, 2, 3, 4, 5, 6, 7 or 8, found 9: change rollout.engines_per_gpu"),
        ("[rollout]\nengines_per_gpu = 2\nvllm.tensor_parallel_size = 2", "expected rollout.engines_per_gpu = 1 with rollout.vllm.tensor_parallel_size = 2, whose engine spans several GPUs, found 2"),
        ("[rollout]\nengines_per_gpu = 2\nvllm.arguments.kv_cache_memory_bytes = 9", "expected no kv_cache_memory_bytes in rollout.vllm.arguments with rollout.engines_per_gpu > 1"),
        ('[rollout]\nvllm.quantization = "fp8"\n[algorithm]\npreset = "reinforce"\ncorrection = "none"\nmax_lag = 0', 'expected an importance correction with rollout.vllm.quantization = "fp8", whose samples another policy draws than the one that is trained, found algorithm.correction = "none": set algorithm.correction = "token_tis", or rollout.vllm.quantization = "none"'),
        ('[rollout]\nvllm.quantization = "fp8"\n[algorithm]\npreset = "tis"\ncorrection = "ignored"', 'found algorithm.correction = "ignored": set algorithm.correction = "token_tis"'),
        ('[rollout]\nvllm.quantization = "fp8"\n[policy]\ndtype = "float32"', 'expected policy.dtype = "bfloat16" with rollout.vllm.quantization = "fp8", which is not verified otherwise, found "float32"'),
        ('[rollout]\nvllm.quantization = "fp8"\nvllm.tensor_parallel_size = 2', 'expected rollout.vllm.tensor_parallel_size = 1 with rollout.vllm.quantization = "fp8"'),
        ('[rollout]\nvllm.quantization = "fp8"\nengines_per_gpu = 2', 'expected rollout.engines_per_gpu = 1 with rollout.vllm.quantization = "fp8"'),
        ('[rollout]\nvllm.quantization = "fp8"\n[placement]\nmode = "shared"', 'expected placement.mode = "separate" with rollout.vllm.quantization = "fp8"'),
        ('[rollout]\nengine = "vllm"\nvllm.quantization = "fp8"\n[policy]\nlora.rank = 8', 'expected weights.lora = "merged" with rollout.vllm.quantization = "fp8", which is not verified otherwise, found "adapter"'),
        ('[rollout]\nengine = "transformers"\nvllm.quantization = "fp8"', 'expected rollout.vllm.quantization = "none" with the engine "transformers", found "fp8"'),
        ('[rollout]\nvllm.arguments.quantization = "fp8"', 'expected no quantization in rollout.vllm.arguments, where nothing proves that new weights are quantised as vLLM loads them: set rollout.vllm.quantization = "fp8"'),
        ('[rollout]\nengine = "transformers"\nengines_per_gpu = 2', 'expected rollout.engines_per_gpu = 1 with the engine "transformers", found 2'),
        ('[run]\ndeterministic = "run"\n[data]\ncurriculum = true\n[algorithm]\nmax_lag = 0\ndynamic_sampling = true', "expected algorithm.dynamic_sampling = false with data.curriculum and run.deterministic"),
        ('[run]\ndeterministic = "run"\n[algorithm]\nmax_lag = 2', 'expected algorithm.max_lag = 0 with run.deterministic = "run", found 2'),
        ('[run]\ndeterministic = "run"\n[rollout]\nengine = "vllm"\n[algorithm]\nmax_lag = 0', 'expected the engine "transformers" with run.deterministic = "run", found "vllm"'),
        ('[weights]\ntransport = "carrier pigeon"', "weights.transport: expected 'pull' or 'file', found 'carrier pigeon': change weights.transport"),
        ("[weights]\nkeep = 5", "weights.keep no longer exists: use nothing: the newest four snapshots are kept"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_a_sentence_that_names_it(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(write(tmp_path, text), environment={})
    assert sentence in str(caught.value)


def test_a_table_within_a_table_is_set_by_file_environment_and_flag(tmp_path: Path) -> None:
    path = write(
        tmp_path, "[rollout]\nreplicas = 3\n[rollout.vllm]\nmax_model_len = 1\narguments.enforce_eager = true\n"
    )
    environment = {
        "PENSTOCK__ROLLOUT__VLLM__MAX_MODEL_LEN": "2",
        "PENSTOCK__ROLLOUT__VLLM__GPU_MEMORY_UTILIZATION": "0.5",
    }
    flags = ["--rollout.vllm.max_model_len", "8", "--rollout.vllm.arguments.swap_space", "0.5"]
    rollout = load(path, flags, environment).rollout
    assert (rollout.replicas, rollout.vllm.max_model_len, rollout.vllm.gpu_memory_utilization) == (3, 8, 0.5)
    assert rollout.vllm.arguments == {"enforce_eager": True, "swap_space": 0.5}


@pytest.mark.parametrize("engine", ["auto", "vllm"])
def test_what_only_vllm_does_is_not_refused_before_the_engine_is_known(tmp_path: Path, engine: str) -> None:
    text = f'[rollout]\nengine = "{engine}"\nvllm.tensor_parallel_size = 2\n[weights]\nkv = "recompute"'
    assert load(write(tmp_path, text), environment={}).rollout.vllm.tensor_parallel_size == 2


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"no settings file at .*none\.toml"):
        load(tmp_path / "none.toml")


def test_every_field_says_what_it_is() -> None:
    keys = [entry.key for entry in settings_help.entries()]
    assert [entry.key for entry in settings_help.entries() if not entry.text] == []
    assert len(keys) == len(set(keys))
    assert {"run.id", "rollout.vllm.max_model_len", "reward.scorers[answer].mode", "weights.deadline_s"} <= set(keys)


def test_each_held_out_set_has_its_own_settings_or_those_of_all(tmp_path: Path) -> None:
    text = '[evaluation]\npath = { easy = "a.jsonl", hard = "b.jsonl" }\nsamples = { hard = 6 }\ntemperature = { hard = 0.8 }\nproblems = 50\n'
    settings = load(write(tmp_path, text), environment={})
    easy, hard = settings.evaluation.held_out
    assert (easy.name, easy.path, easy.samples, easy.temperature, easy.problems, easy.pass_at) == (
        "easy",
        "a.jsonl",
        1,
        0.0,
        50,
        (),
    )
    assert (hard.name, hard.samples, hard.temperature, hard.problems, hard.pass_at) == ("hard", 6, 0.8, 50, (2, 4, 6))
    assert loads(dumps(settings), "again").evaluation == settings.evaluation


def test_settings_that_are_not_listed_are_few_and_internal() -> None:
    listed = {entry.key for entry in settings_help.entries() if entry.kind}
    every = {entry.key for entry in settings_help.entries(internal=True) if entry.kind}
    assert len(every - listed) <= 25
    assert all(key.startswith("internal.") for key in every - listed)


def test_what_is_dumped_is_loaded_again_without_the_password(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '[rollout.vllm.arguments]\nswap_space = 1\n[bus]\nurl = "redis://:secret@host:1/0"\n[[reward.scorers]]\nkind = "format"\nneeds_stop = true\n',
    )
    settings = load(path, environment={})
    dump(settings, tmp_path / "resolved.toml")
    assert "secret" not in (tmp_path / "resolved.toml").read_text()
    again = load(tmp_path / "resolved.toml", environment={})
    assert (again.reward, again.rollout) == (settings.reward, settings.rollout)


@pytest.mark.parametrize(
    "file", sorted(set((ROOT / "config").glob("*.toml")) - {ROOT / "config/cluster.toml"}), ids=lambda file: file.name
)
def test_the_configs_that_come_with_penstock_load(file: Path) -> None:
    load(file, environment={})


def test_runs_of_one_name_in_different_folders_keep_their_snapshots_apart() -> None:
    here, there = (Settings.model_validate({"run": {"id": "x", "folder": folder}}) for folder in ("/a", "/b"))
    assert here.snapshot_folder != there.snapshot_folder


def test_an_expression_that_names_no_scorer_is_refused_by_every_service() -> None:
    with pytest.raises(ValueError, match="expected the name of a scorer"):
        Settings.model_validate({"reward": {"expression": "anser"}})


def test_a_replaced_setting_with_its_default_comes_from_an_earlier_run_and_is_left_out() -> None:
    assert loads('[weights]\nprobe_gap_nats = 0.05\nkeep = 4\nkv = "recompute"', "test").weights.kv == "recompute"


@pytest.mark.parametrize("key", REPLACED)
def test_a_removed_setting_is_left_out_with_its_default_and_else_refused_with_what_to_use(key: str) -> None:
    default, instead = REPLACED[key]
    table, _, name = key.rpartition(".")
    kind = table.partition("[")[2].rstrip("]")
    needed: dict[str, dict[str, str | list[str]]] = {
        "judge": {"url": "http://a/v1", "model": "m"},
        "model": {"model": "m"},
        "format": {"tags": ["a"]},
        "python": {"function": "a:b"},
        "trl": {"functions": ["a:b"]},
        "verifiers": {"functions": ["a:b"]},
    }
    head = "[[reward.scorers]]\n" + tomli_w.dumps({"kind": kind, **needed[kind]}) if kind else f"[{table}]\n"

    def text(value: object) -> str:
        return head + tomli_w.dumps({name: value})

    loads(text(default), "run.toml")
    with pytest.raises(SettingsError) as caught:
        loads(text("another"), "run.toml")
    assert f"{name} no longer exists: use {instead}" in str(caught.value)


def test_the_empty_default_that_the_reference_prints_is_the_default() -> None:
    text = Path("docs/reference/settings.md").read_text(encoding="utf-8")
    keys = [key for key in re.findall(r'^\| `([\w.]+)` \| `""` \|', text, re.MULTILINE) if "[" not in key]
    assert {"evaluation.path", "weights.folder", "run.id"} <= {*keys}
    given, default = (loads("", "flags", flags, environment={}) for flags in ([f"--{key}=" for key in keys], []))
    assert given == default
