"""What a replica reads of a version by file: its changes, and the whole, of a real policy that AdamW moves on a CPU.

    python -m benchmarks.weights.changes POLICY [--text FILE]

POLICY: a folder in Hugging Face's format. For each learning rate the policy (float32, published in bfloat16) takes four
steps on lines of a text; from the second on each version is received twice, by a shadow that holds the one before and by
an empty one, and compared byte by byte. Prints one JSON object; fails if they differ.
"""

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.shared.bus.messages import PolicyRecord, PolicyVersion
from penstock.shared.weights.format import manifest
from penstock.shared.weights.format.flat import FlatSnapshot
from penstock.shared.weights.format.snapshot import Snapshot, write_snapshot
from penstock.shared.weights.receiver.puller import file_offer
from penstock.shared.weights.receiver.receiver import Receiver
from penstock.shared.weights.transport.offer import Offer

RATES = (1e-6, 1e-5, 1e-4)
STEPS = 4
CPU = torch.device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policy", type=Path)
    parser.add_argument("--text", type=Path, default=Path("README.md"))
    options = parser.parse_args()
    texts = [line for line in options.text.read_text().splitlines() if len(line) > 80]
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    rates = {f"{rate:g}": measure(options.policy, texts, rate) for rate in RATES}
    print(json.dumps({"versions": versions, "cpu": platform.processor() or platform.machine(), "rates": rates}))


def measure(policy: Path, texts: list[str], rate: float) -> list[dict[str, Any]]:
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    receiver, shadow, rows = Receiver(1, 1, CPU), None, []
    with tempfile.TemporaryDirectory() as folder:
        for step in range(STEPS):
            ids = torch.tensor([tokenizer.encode(texts[step % len(texts)])[:64]])
            model(ids, labels=ids).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            written, write_s = timed(publish, Path(folder), step, model)
            offer = offered(written, step)
            shadow = shadow or FlatSnapshot(offer.layout, CPU)
            _, changes_s = timed(receiver.receive, offer, shadow)
            whole = FlatSnapshot(offer.layout, CPU)
            _, whole_s = timed(Receiver(1, 1, CPU).receive, offer, whole)
            if not all(torch.equal(a, b) for a, b in zip(shadow.buckets, whole.buckets, strict=True)):
                raise SystemExit(f"version {step} of the changes differs from the whole")
            files = manifest.read(written.location, written.digest)
            if step:
                read = files.changes.nbytes if files.changes else None
                nbytes = sum(bucket.nbytes for bucket in files.buckets)
                rows.append(
                    {"whole_bytes": nbytes, "changes_bytes": read, "percent": read and round(100 * read / nbytes, 2)}
                    | {"write_s": write_s, "receive_changes_s": changes_s, "receive_whole_s": whole_s}
                )
    return rows


def publish(folder: Path, step: int, model: torch.nn.Module) -> Snapshot:
    return write_snapshot(folder, PolicyVersion(step), step, model.named_parameters(), torch.bfloat16, changes=True)


def offered(written: Snapshot, step: int) -> Offer:
    record = PolicyRecord(PolicyVersion(step), None, step, 0.0, written.digest, str(written.location))
    return file_offer(record, 60.0)


def timed(call: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    began_s = time.perf_counter()
    value = call(*arguments)
    return value, round(time.perf_counter() - began_s, 3)


if __name__ == "__main__":
    main()
