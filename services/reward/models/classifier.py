"""A transformers reward model: text to token ids to one value each. Imports torch.

Batches are right-padded, invisibly to causal models and masked for others. A causal classifier reads the last
non-padding token, so without a padding token each batch uses one that its texts lack.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from penstock.services.reward.models.placement import Placed, first_line, pick_device, pick_dtype
from penstock.services.reward.models.self_test import LENGTHS, choose_alone
from penstock.shared.bus.messages import Float32Array, Prompt
from penstock.shared.bus.transcripts import Conversation, Messages
from penstock.shared.errors import PermanentError, SettingsError
from penstock.shared.model.causal_model import check_loaded, eager_attention, ordinary_ids
from penstock.shared.model.rendering import chat_template
from penstock.shared.model.tokenizer import clock_of, encode_text
from penstock.shared.process.memory_timeline import Held
from penstock.shared.settings.rewards.models import ModelScorer, ModelWork

_SCALAR_HEADS = ("score", "v_head.summary", "v_head", "value_head", "reward_head", "rm_head", "regression_head")
"""Names of a scalar head in a checkpoint (TRL: ``v_head.summary``)."""
_UNBOUNDED_TOKENS = 1_000_000


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
    """One completion with its prompt, tokenized."""

    token_ids: tuple[int, ...]
    cut_tokens: int = 0

    @property
    def tokens(self) -> int:
        return len(self.token_ids)


class Classifier:
    """A sequence classifier, or a trunk with a scalar head. Raises SettingsError."""

    def __init__(self, scorer: ModelScorer, work: ModelWork) -> None:
        self._scorer = scorer
        self._where = f"of scorer {scorer.name!r} in [[reward.scorers]]"
        device = pick_device(work.device, "reward.models.device")
        dtype = pick_dtype(device)
        self._tokenizer = self._load(self._open_tokenizer, "tokenizer", scorer.model)
        model = self._load(lambda: self._open(dtype), "model", scorer.model)
        self._is_scalar = isinstance(model, ScalarHead)
        self._config = model.config
        self._config.use_cache = False
        self._text_config = self._config.get_text_config()
        own = self._text_config.pad_token_id
        self._own_padding: int | None = own if own is not None and own >= 0 else None  # old configs use -1 for None
        self._label = self._find_label()
        self._longest = self._find_longest()
        self._placed = Placed(model, device, work.threads)
        self._alone = False
        self._alone = self._placed.guarded(self._test)

    def _test(self) -> bool:
        lot, ids = np.random.default_rng(0), ordinary_ids(self._config)
        texts = [Text(tuple(lot.choice(ids, max(1, min(length, self._longest))).tolist())) for length in LENGTHS]

        def reference(text: Text) -> Float32Array:
            with eager_attention(self._placed.module):
                return np.array(self._values([text]), dtype=np.float32)

        def compute(batch: Sequence[Text]) -> list[Float32Array]:
            return [np.array([value], dtype=np.float32) for value in self._values(batch)]

        half = next(self._placed.module.parameters()).dtype != torch.float32
        return choose_alone(texts, compute, reference, half=half, setting=f"model {self._where}")

    def read(
        self, prompt: Prompt, completions: Sequence[str], conversations: Sequence[Conversation | None] = ()
    ) -> list[Text]:
        """Tokenize each completion; texts that are too long lose their beginning. With a chat template, a completion that
        ends a conversation is read with all of it.

        Raises:
            PermanentError: chat template or tokenizer does not fit.
        """
        turns: Messages = [{"role": turn.role, "content": turn.content} for turn in prompt.messages or ()]
        if not turns:
            turns = [{"role": "user", "content": prompt.text or ""}]
        if not self._uses_template():
            start = prompt.text if prompt.text is not None else "".join(turn["content"] + "\n" for turn in turns)
            return [self._fitted(encode_text(self._tokenizer, start + completion)) for completion in completions]
        before = [
            turns if each is None else [*each.prompt, *each.completion[:-1]]
            for each in conversations or [None] * len(completions)
        ]
        return [
            self._fitted(self._templated([*messages, {"role": "assistant", "content": completion}], prompt))
            for messages, completion in zip(before, completions, strict=True)
        ]

    def _uses_template(self) -> bool:
        return self._scorer.template not in ("auto", "plain") or (
            self._scorer.template == "auto" and bool(self._tokenizer.chat_template)
        )

    def _templated(self, turns: Messages, prompt: Prompt) -> list[int]:
        try:
            text = chat_template.render(
                self._tokenizer, turns, template=self._scorer.own_template, at_s=clock_of(prompt)
            )
        except chat_template.TemplateFailed as error:
            raise PermanentError(
                f"the chat template {self._where} cannot render the messages of {prompt.problem}: {error}"
            ) from error
        token_ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return token_ids

    def _fitted(self, token_ids: Sequence[int]) -> Text:
        """Keep the end of a long text, after its BOS token, if any."""
        if not token_ids:
            raise PermanentError(f"expected a text for the model {self._where}, found an empty one")
        if max(token_ids) >= self._text_config.vocab_size:
            raise PermanentError(
                f"expected token ids under the model's {self._text_config.vocab_size}, found {max(token_ids)}: the tokenizer "
                f"is another model's; change model {self._where}"
            )
        over = len(token_ids) - self._longest
        if over <= 0:
            return Text(tuple(token_ids))
        first = {self._tokenizer.cls_token_id, self._tokenizer.bos_token_id} - {None}
        kept = 1 if token_ids[0] in first and self._longest > 1 else 0
        return Text((*token_ids[:kept], *token_ids[over + kept :]), cut_tokens=over)

    def compute(self, batch: Sequence[Text]) -> list[float]:
        """Return a value for each text, in one forward pass. Raises NoRoom."""
        return self._placed.guarded(lambda: self._values(batch))

    @property
    def held(self) -> Held:
        return self._placed.held("weights")

    @property
    def on_cpu(self) -> bool:
        return self._placed.device.type == "cpu"

    def offload(self) -> None:
        self._placed.offload()

    def restore(self) -> None:
        self._placed.restore()

    def _values(self, batch: Sequence[Text]) -> list[float]:
        pad = self._padding(batch)
        if (pad is None or self._alone) and len(batch) > 1:
            return [value for text in batch for value in self._values([text])]
        self._text_config.pad_token_id = pad
        longest, device = max(text.tokens for text in batch), self._placed.device
        rows = [[*text.token_ids, *[pad or 0] * (longest - text.tokens)] for text in batch]
        mask = [[1] * text.tokens + [0] * (longest - text.tokens) for text in batch]
        outputs = self._placed.module(
            input_ids=torch.tensor(rows, device=device), attention_mask=torch.tensor(mask, device=device)
        )
        values: list[float] = self._chosen(outputs.logits.float()).tolist()
        return values

    def _padding(self, batch: Sequence[Text]) -> int | None:
        """Return the model's padding token, or one that no text contains, or None."""
        if self._own_padding is not None:
            return self._own_padding
        used = set(itertools.chain.from_iterable(text.token_ids for text in batch))
        return next((token for token in range(self._text_config.vocab_size) if token not in used), None)

    def _chosen(self, logits_BL: Tensor) -> Tensor:
        if self._scorer.value == "logit":
            return logits_BL[:, self._label]
        if logits_BL.shape[1] == 1:
            return logits_BL[:, 0].sigmoid()
        return logits_BL.softmax(-1)[:, self._label]

    def _load(self, opened: Callable[[], Any], kind: str, source: str) -> Any:
        """Call ``opened``; errors about the folder become SettingsError."""
        from safetensors import SafetensorError
        from transformers.utils import logging

        logging.disable_progress_bar()
        unusable = (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError, SafetensorError)
        try:
            return opened()
        except unusable as error:
            raise SettingsError(
                f"could not load a {kind} from {source!r} ({first_line(error)}): change {kind} {self._where}"
            ) from error

    def _open_tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._scorer.model, trust_remote_code=self._scorer.trust_remote_code)

    def _open(self, dtype: torch.dtype) -> Any:
        from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

        source, remote = self._scorer.model, self._scorer.trust_remote_code
        config = AutoConfig.from_pretrained(source, trust_remote_code=remote)
        head = None if _is_classifier(config) else _scalar_head(source)
        if head is None:
            return self._whole(AutoModelForSequenceClassification, dtype)
        weight, bias = head
        return ScalarHead(self._whole(AutoModel, dtype), weight.to(dtype), None if bias is None else bias.to(dtype))

    def _whole(self, kind: Any, dtype: torch.dtype) -> Any:
        model, loaded = kind.from_pretrained(
            self._scorer.model,
            dtype=dtype,
            trust_remote_code=self._scorer.trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
        )
        self._check_head(model, loaded)
        check_loaded(f"model {self._where}", self._scorer.model, loaded)
        return model

    def _check_head(self, model: Any, loaded: dict[str, Any]) -> None:
        """Raise SettingsError if only the head's name in the weights is not that of the class in config.json."""
        missing, others = sorted(loaded["missing_keys"]), loaded["unexpected_keys"]
        head = next((name for name in _SCALAR_HEADS if f"{name}.weight" in others), None)
        in_trunk = any(name.startswith(f"{model.base_model_prefix}.") for name in missing)
        if missing and not in_trunk and head is not None and _is_classifier(model.config):
            raise SettingsError(
                f"expected {missing[0]}, as config.json in {self._scorer.model!r} says that it is a {type(model).__name__}, "
                f'found the head {head}.weight instead: remove "architectures" from config.json, and this head is read at the '
                f"last token, or change model {self._where}"
            )

    def _find_label(self) -> int:
        names = {number: str(name) for number, name in (getattr(self._config, "id2label", None) or {}).items()}
        count = 1 if self._is_scalar else int(getattr(self._config, "num_labels", 1))
        label = self._scorer.label
        if not label and count == 1:
            return 0
        matching = [number for number in range(count) if label in (str(number), names.get(number))]
        if not label or not matching:
            known = ", ".join(names.get(number, str(number)) for number in range(count))
            raise SettingsError(
                f"expected one of the model's {count} outputs ({known}), found {label or 'none'!r}: change label {self._where}"
            )
        return matching[0]

    def _find_longest(self) -> int:
        bounds = [getattr(self._text_config, "max_position_embeddings", None), self._tokenizer.model_max_length]
        return min(
            [int(bound) for bound in bounds if bound and 0 < bound < _UNBOUNDED_TOKENS], default=_UNBOUNDED_TOKENS
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Outputs:
    logits: Tensor


class ScalarHead(nn.Module):
    """A trunk with a linear layer over the hidden state of a text's last token."""

    def __init__(self, trunk: Any, weight_LD: Tensor, bias_L: Tensor | None) -> None:
        super().__init__()
        self.trunk = trunk
        self.config = trunk.config
        self.weight = nn.Parameter(weight_LD, requires_grad=False)
        self.bias = None if bias_L is None else nn.Parameter(bias_L, requires_grad=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> _Outputs:
        """Return the outputs (B × L) of right-padded texts."""
        hidden_BTD = self.trunk(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        last_B = attention_mask.sum(-1) - 1
        hidden_BD = hidden_BTD[torch.arange(len(input_ids), device=hidden_BTD.device), last_B]
        return _Outputs(nn.functional.linear(hidden_BD, self.weight, self.bias))


def _is_classifier(config: Any) -> bool:
    """Whether a checkpoint says that it is of a class for sequence classification."""
    names = [*(getattr(config, "architectures", None) or ()), *(getattr(config, "auto_map", None) or ())]
    return any(name.endswith("ForSequenceClassification") for name in names)


def _scalar_head(source: str) -> tuple[Tensor, Tensor | None] | None:
    """Return weight (1 × D) and bias of a checkpoint's scalar head, if it has one."""
    from huggingface_hub import snapshot_download
    from safetensors import safe_open

    folder = Path(source) if Path(source).is_dir() else Path(snapshot_download(source, allow_patterns="*.safetensors"))
    places: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            places |= dict.fromkeys(file.keys(), path)

    def tensor(name: str) -> Tensor:
        with safe_open(places[name], framework="pt") as file:
            value: Tensor = file.get_tensor(name)
            return value

    name = next((name for name in _SCALAR_HEADS if f"{name}.weight" in places), None)
    weight = None if name is None else tensor(f"{name}.weight")
    if weight is None or weight.ndim != 2 or weight.shape[0] != 1:
        return None
    return weight, tensor(f"{name}.bias") if f"{name}.bias" in places else None
