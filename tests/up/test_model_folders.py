"""A model folder that no process could use is refused before any starts, with its files and the setting."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from penstock.services.cli.__main__ import main
from penstock.services.up.requirements import check_architecture
from penstock.shared.errors import SettingsError
from penstock.shared.model.model_source import check_trained
from tests.conftest import need_module
from tests.support import tiny
from tests.support.model_folders import write_model, write_safetensors
from tests.support.tolerance import FORWARD

MESSAGES = '{"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}\n'
WITHOUT_TEMPLATE = (
    "which chat messages need: change policy.model, or give texts in data.prompt_field and no data.user or data.system"
)


def shard(folder: Path, *present: str) -> None:
    write_safetensors(folder / "model.safetensors").unlink()
    names = [f"model-{number}-of-5.safetensors" for number in range(1, 6)]
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict(zip("abcde", names, strict=True))})
    )
    for name in present:
        write_safetensors(folder / name)


def cut(name: str, length: int) -> Callable[[Path], None]:
    def damaged(folder: Path) -> None:
        (folder / name).write_bytes((folder / name).read_bytes()[:length])

    return damaged


def remove(*names: str) -> Callable[[Path], None]:
    def removed(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return removed


def write(name: str, text: str) -> Callable[[Path], None]:
    def damaged(folder: Path) -> None:
        (folder / name).write_text(text)

    return damaged


def an_empty_index(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text("{}")


def all_shards_but_one_cut(folder: Path) -> None:
    shard(folder, *(f"model-{number}-of-5.safetensors" for number in range(1, 6)))
    cut("model-3-of-5.safetensors", 100)(folder)


def a_gguf_file(folder: Path) -> None:
    (folder / "config.json").rename(folder / "q4.gguf")


def a_folder_of_checkpoints(folder: Path) -> None:
    (folder / "checkpoint-100").mkdir()
    (folder / "config.json").rename(folder / "checkpoint-100" / "config.json")


def another_tokenizer(folder: Path) -> None:
    write("config.json", '{"vocab_size": 2}')(folder)
    write("tokenizer.json", '{"model": {"vocab": {"a": 0, "b": 1, "c": 2}}}')(folder)


HEADER = '{"w": {"data_offsets": [0, 1e999]}}'
DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no tokenizer": (
        remove("tokenizer.json", "tokenizer_config.json"),
        "the folder '{model}' has no tokenizer (tokenizer_config.json, tokenizer.json, tokenizer.model, vocab.json or "
        "vocab.txt): change policy.model",
    ),
    "no vocabulary": (
        remove("tokenizer.json"),
        "the folder '{model}' has a tokenizer_config.json and no vocabulary (tokenizer.json, tokenizer.model, vocab.json "
        "or vocab.txt): copy the whole tokenizer, or change policy.model",
    ),
    "a tokenizer that is cut off": (
        write("tokenizer.json", '{"model": '),
        "{model}/tokenizer.json is damaged or cut off (no JSON): copy it again, or change policy.model",
    ),
    "no config": (remove("config.json"), "the folder '{model}' has no config.json: change policy.model"),
    "a GGUF file": (
        a_gguf_file,
        "the folder '{model}' has no config.json, but a GGUF file, of which nothing is read: change policy.model",
    ),
    "a folder of checkpoints": (
        a_folder_of_checkpoints,
        "the folder '{model}' has no config.json, but 'checkpoint-100' in it has one: change policy.model",
    ),
    "quantised weights": (
        write("config.json", '{"quantization_config": {"quant_method": "gptq"}}'),
        "expected a model to train in '{model}', found a quantised one (gptq in config.json): save it dequantised, or change "
        "policy.model",
    ),
    "a vision-language model": (
        write("config.json", '{"model_type": "qwen2_vl", "architectures": ["Qwen2VLForConditionalGeneration"]}'),
        "expected a causal language model in '{model}', found model_type 'qwen2_vl' in config.json, another kind of model: "
        "change policy.model",
    ),
    "an unknown architecture": (
        write("config.json", '{"model_type": "nonesuch", "architectures": ["NonesuchForCausalLM"]}'),
        "expected a causal language model in '{model}', found model_type 'nonesuch' in config.json, which the installed "
        "transformers does not know: change policy.model",
    ),
    "a tokenizer of another model": (
        another_tokenizer,
        "expected a tokenizer of at most the model's 2 tokens, found 3: it is another model's; change policy.tokenizer or "
        "policy.model",
    ),
    "a config that is cut off": (
        write("config.json", '{"model_type": "qw'),
        "{model}/config.json is damaged or cut off (no JSON): copy it again, or change policy.model",
    ),
    "a config of another kind": (
        write("config.json", "[1]"),
        "{model}/config.json is damaged or cut off (no JSON object): copy it again, or change policy.model",
    ),
    "no weights": (
        remove("model.safetensors"),
        "the folder '{model}' has no weights (model.safetensors or model.safetensors.index.json): change policy.model",
    ),
    "missing shards": (
        lambda folder: shard(folder, "model-4-of-5.safetensors"),
        "the folder '{model}' has no model-1-of-5.safetensors, model-2-of-5.safetensors, model-3-of-5.safetensors and 1 "
        "more, which its model.safetensors.index.json names: copy the whole model, or change policy.model",
    ),
    "an index of another kind": (
        an_empty_index,
        "{model}/model.safetensors.index.json is damaged or cut off (no weight_map): copy it again, or change policy.model",
    ),
    "a shard that is cut off": (
        all_shards_but_one_cut,
        "{model}/model-3-of-5.safetensors is damaged or cut off (100 bytes, expected {whole}): copy it again, or change "
        "policy.model",
    ),
    "a header that is cut off": (
        cut("model.safetensors", 30),
        "{model}/model.safetensors is damaged or cut off (no header of safetensors): copy it again, or change policy.model",
    ),
    "an empty file of weights": (
        cut("model.safetensors", 0),
        "{model}/model.safetensors is damaged or cut off (no header of safetensors): copy it again, or change policy.model",
    ),
    "sizes that are no numbers": (
        write("model.safetensors", len(HEADER).to_bytes(8, "little").decode() + HEADER),
        "{model}/model.safetensors is damaged or cut off (no header of safetensors): copy it again, or change policy.model",
    ),
}  # fmt: skip


def run(folder: Path, rows: str = '{"prompt": "1+1=", "answer": "2"}\n') -> Path:
    (folder / "train.jsonl").write_text(rows)
    config = folder / "run.toml"
    paths = f'policy.model = "{folder / "model"}"\ndata.path = "{folder / "train.jsonl"}"\n'
    config.write_text(f'{paths}run.folder = "{folder / "runs"}"\n')
    return config


@pytest.mark.parametrize("name", DAMAGES)
def test_up_refuses_the_folder_before_it_makes_a_run(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, sentence = DAMAGES[name]
    model = write_model(tmp_path / "model")
    whole = (model / "model.safetensors").stat().st_size
    damage(model)
    assert main(["up", str(run(tmp_path))]) == 2
    assert capsys.readouterr().err == f"penstock up: {sentence.format(model=model, whole=whole)}\n"
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
        {"model_type": "gpt-sw3", "architectures": ["GPT2LMHeadModel"]},
        {"model_type": "gemma3_text"},
        {"model_type": "own", "auto_map": {"AutoModelForCausalLM": "own.Own"}},
    ],
)
def test_a_model_that_transformers_loads_is_not_refused_by_its_config(
    tmp_path: Path, config: dict[str, object]
) -> None:
    write("config.json", json.dumps(config))(write_model(tmp_path / "model"))
    check_architecture("policy.model", str(tmp_path / "model"))


@pytest.mark.parametrize(("rows", "flags"), [(MESSAGES, []), (None, ["--data.system", "Add."])], ids=["rows", "system"])
def test_up_refuses_chat_messages_for_a_tokenizer_without_a_template(
    tmp_path: Path, rows: str | None, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path / "model")
    config = run(tmp_path) if rows is None else run(tmp_path, rows)
    assert main(["up", str(config), *flags]) == 2
    assert capsys.readouterr().err.endswith(f"{WITHOUT_TEMPLATE}\n")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", ["no tokenizer", "no vocabulary", "a tokenizer that is cut off"])
def test_data_check_names_what_the_tokenizer_lacks(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, sentence = DAMAGES[name]
    damage(write_model(tmp_path / "model"))
    assert main(["data", "check", str(run(tmp_path))]) == 2
    assert capsys.readouterr().err == f"penstock data: {sentence.format(model=tmp_path / 'model')}\n"


@pytest.mark.parametrize("contents", ['{"model_type": "qw', "[1]"])
def test_plan_refuses_a_damaged_config(tmp_path: Path, contents: str, capsys: pytest.CaptureFixture[str]) -> None:
    write("config.json", contents)(write_model(tmp_path / "model"))
    assert main(["plan", str(run(tmp_path))]) == 2
    assert f"{tmp_path}/model/config.json" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["mxfp4", "fp8"])
def test_a_quantised_model_that_the_trainer_may_dequantise_is_its_to_refuse_in_a_run_without_replicas(
    tmp_path: Path, method: str
) -> None:
    model = write_model(tmp_path / "model")
    write("config.json", json.dumps({"quantization_config": {"quant_method": method}}))(model)
    check_trained("policy.model", str(model), generates=False)
    with pytest.raises(SettingsError, match=f"found a quantised one .{method} in config.json"):
        check_trained("policy.model", str(model))


def test_an_adapter_is_refused_with_the_command_that_merges_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_module("peft", "peft")
    import torch
    from peft import LoraConfig, get_peft_model

    base, adapter = tiny.save(tmp_path), tmp_path / "adapter's"
    configuration = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), configuration)
    adapted.save_pretrained(str(adapter))
    with pytest.raises(SettingsError, match=r"no config\.json, but a LoRA adapter of ") as refused:
        check_trained("policy.model", str(adapter))
    assert str(refused.value).endswith("(policy.tokenizer): change policy.model")
    monkeypatch.chdir(tmp_path)
    python, option, code = shlex.split(re.findall(r"`(python .*?)`", str(refused.value))[0])
    assert (python, option) == ("python", "-c")
    exec(code, {})  # as a user runs it, without another process that imports torch
    check_trained("policy.model", "merged")
    ids = torch.arange(5)[None]
    merged = AutoModelForCausalLM.from_pretrained("merged", dtype=torch.float32)
    torch.testing.assert_close(merged(ids).logits, adapted.eval()(ids).logits, rtol=0, atol=FORWARD)
