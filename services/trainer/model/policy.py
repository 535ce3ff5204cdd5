"""The policy: a Hugging Face causal model that returns logprobs of given tokens."""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.services.trainer.batch.packing import MicroBatch, Shard, Support
from penstock.services.trainer.model.layers import attention, kernels, ulysses
from penstock.services.trainer.model.layers.logits import TokenLogprobs, token_logprobs
from penstock.services.trainer.model.memory.sizes import measure
from penstock.services.trainer.model.stochastic_layers import train_without_noise
from penstock.services.trainer.model.trunk import Packing, Trunk
from penstock.shared.errors import SettingsError
from penstock.shared.files.durable import whole_folder
from penstock.shared.model.causal_model import load_causal_model
from penstock.shared.model.logits_projection import LogitsType, projection
from penstock.shared.model.logits_transform import logits_transform
from penstock.shared.model.model_source import check_model
from penstock.shared.model.rope import settle_rope
from penstock.shared.process.importing import importing
from penstock.shared.settings import PolicySettings


class Policy(nn.Module):
    """A causal language model over micro-batches; logits are divided by each token's temperature.

    Args:
        model: a Hugging Face causal model.
        entropy_gradient: for an entropy bonus.
        kind: of attention.
        chunk_tokens: maximum tokens with logits at a time; 0: all.
        fused_logits: by one GPU kernel.
        logits: their number type.
        packing: see ``trunk``.
        distils: forward passes with a gradient also return the logprobs of the teacher's most probable tokens.

    Raises:
        CannotPack: ``packing`` is "rows", and a module cannot be packed.
        SettingsError: unknown scaling of logits.
    """

    def __init__(
        self,
        model: Any,
        *,
        entropy_gradient: bool = False,
        kind: attention.AttentionKind = "auto",
        chunk_tokens: int = 0,
        fused_logits: bool = True,
        logits: LogitsType = "model",
        packing: Packing = "auto",
        distils: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.sizes = measure(model)
        self.trunk = Trunk(model, kind, packing)
        self._entropy_gradient = entropy_gradient
        self._chunk_tokens = chunk_tokens
        self._fused_logits = fused_logits
        self._logits: LogitsType = logits
        self._distils = distils
        self.keeps_logits = False
        projection(model.get_output_embeddings(), logits)  # fails now rather than at the first batch
        self._transform = logits_transform(model)

    def train(self, mode: bool = True) -> "Policy":
        """Switch training mode (``stochastic_layers``)."""
        super().train(mode)
        train_without_noise(self.model, mode)
        return self

    def forward(self, batch: MicroBatch) -> TokenLogprobs:
        """Return the logprobs of ``batch``'s trained tokens; of a row that several ranks hold, on the first of them."""
        if batch.shard is None:
            return self._logprobs(batch)
        return _on_first(self._logprobs(batch.shard.part), batch.shard)

    def _logprobs(self, batch: MicroBatch) -> TokenLogprobs:
        hidden_ND = self.trunk.hidden_states(batch)
        return token_logprobs(
            hidden_ND,
            self.model.get_output_embeddings(),
            torch.from_numpy(batch.targets_N).to(hidden_ND.device),
            torch.from_numpy(batch.temperatures_N).to(hidden_ND.device),
            self._chunk_tokens,
            transform=self._transform,
            entropy_gradient=self._entropy_gradient,
            fused=self._fused_logits,
            kind=self._logits,
            keep=self.keeps_logits,
            support=_on(batch.support, hidden_ND.device),
            tops_NK=_tops(batch, hidden_ND.device) if self._distils and torch.is_grad_enabled() else None,
        )

    @property
    def logits_bytes(self) -> int:
        """Bytes of a token's kept logits; 0 with torch's operations, which keep several copies."""
        output = self.model.get_output_embeddings().weight
        if not (self._fused_logits and self._chunk_tokens and output.is_cuda):
            return 0
        return int(self.model.config.get_text_config().vocab_size) * (
            4 if self._logits == "float32" else output.element_size()
        )


def _on_first(own: TokenLogprobs, shard: Shard) -> TokenLogprobs:
    """Return all ranks' logprobs on the first."""
    values = {field.name: getattr(own, field.name) for field in dataclasses.fields(own)}
    columns = {
        name: value.reshape(len(value), *value.shape[1:] or (1,)) for name, value in values.items() if value is not None
    }
    whole_NC = ulysses.to_first(torch.cat(list(columns.values()), -1), shard)
    pieces = torch.split(whole_NC, [value.shape[-1] for value in columns.values()], -1)
    return TokenLogprobs(
        **{
            name: piece if values[name].ndim > 1 else piece[:, 0].contiguous()
            for name, piece in zip(columns, pieces, strict=True)
        }
    )


def _on(support: Support | None, device: torch.device) -> tuple[Tensor, Tensor] | None:
    if support is None:
        return None
    return torch.from_numpy(support.ids_NK).to(device, torch.int64), torch.from_numpy(support.sizes_N).to(device)


def _tops(batch: MicroBatch, device: torch.device) -> Tensor | None:
    return None if batch.teacher is None else torch.from_numpy(batch.teacher.ids_NK).to(device, torch.int64)


def load_model(
    settings: PolicySettings,
    training_dtype: torch.dtype,
    context_tokens: int = 0,
    setting: str = "policy.model",
    *,
    needs_output: bool = True,
) -> Any:
    """Return the Hugging Face model in ``policy.model``, for ``context_tokens`` (0: the model's own;
    ``penstock.shared.model.rope``). ``setting``: what names the model; ``needs_output``: whether its output layer is used.

    Raises:
        SettingsError: it does not exist, lacks tensors, or has unknown rotary embeddings.
    """
    check_model(setting, settings.model)
    model = load_causal_model(
        setting,
        settings.model,
        training_dtype,
        trust_remote_code=settings.trust_remote_code,
        needs_output=needs_output,
    )
    check_numbers(model, settings.model)
    settle_rope(model, context_tokens)
    return model


def check_numbers(model: nn.Module, source: str) -> None:
    """Raise SettingsError for quantised weights, which cannot be trained."""
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or parameter.itemsize < 2:
            raise SettingsError(
                f"expected weights in bfloat16, float16 or float32 in {source!r}, found {name} in {parameter.dtype}, which is quantised: "
                "save the model dequantised and change policy.model"
            )


def outline(settings: PolicySettings) -> Any:
    """Return the model in ``policy.model`` on the meta device."""
    check_model("policy.model", settings.model)
    with importing():
        from transformers import AutoConfig, AutoModelForCausalLM
    trust = settings.trust_remote_code
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(settings.model, trust_remote_code=trust), trust_remote_code=trust
        )


def load_reference(
    settings: PolicySettings,
    dtype: torch.dtype,
    device: str,
    *,
    kind: attention.AttentionKind = "auto",
    fused: kernels.KernelKind = "auto",
    chunk_tokens: int = 0,
    logits: LogitsType = "model",
    packing: Packing = "auto",
    context_tokens: int = 0,
) -> Policy:
    """Return the initial policy, frozen and whole on this rank's device."""
    model = load_model(settings, dtype, context_tokens)
    kernels.install(model, fused, device)
    fuses = kernels.fuses_logits(fused)
    reference = Policy(model, kind=kind, chunk_tokens=chunk_tokens, fused_logits=fuses, logits=logits, packing=packing)
    return reference.to(torch.device(device)).eval().requires_grad_(False)


def load_trunk(settings: PolicySettings, model: str, dtype: torch.dtype, context_tokens: int = 0) -> tuple[Any, int]:
    """Return ``model`` (empty: the policy's) without output layer, and its hidden width."""
    chosen = settings.model_copy(update={"model": model or settings.model})
    setting = "algorithm.critic.model" if model else "policy.model"
    whole = load_model(chosen, dtype, context_tokens, setting, needs_output=False)
    return attention.decoder_of(whole), int(whole.config.get_text_config().hidden_size)


def on_host(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return copies in the host's memory."""
    return {name: tensor.to("cpu", copy=True) for name, tensor in tensors}


def export(model: Any, tensors: Mapping[str, Tensor], settings: PolicySettings, folder: Path) -> None:
    """Write ``model`` with ``tensors`` and the tokenizer in Hugging Face form, atomically."""
    from transformers import AutoTokenizer

    with whole_folder(folder) as beside:
        _save(model, tensors, beside)
        AutoTokenizer.from_pretrained(
            settings.tokenizer or settings.model, trust_remote_code=settings.trust_remote_code
        ).save_pretrained(beside)


def _save(model: Any, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Save ``model`` with its generation_config.json as given: transformers refuses to save some that it loads, such as
    one with a temperature but without sampling.
    """
    given = getattr(model, "generation_config", None)
    try:
        if given is not None:
            model.generation_config = type(given)()
        model.save_pretrained(folder, state_dict=tensors)
    finally:
        if given is not None:
            model.generation_config = given
    if (written := folder / "generation_config.json").is_file() and given is not None:
        given.to_json_file(written)


def export_adapter(factors: Mapping[str, Tensor], configuration: bytes, folder: Path) -> None:
    """Write an adapter's ``factors`` (PEFT names) and configuration in PEFT form, atomically."""
    from safetensors.torch import save_file

    with whole_folder(folder) as beside:
        (beside / "adapter_config.json").write_bytes(configuration)
        copies = {name: tensor.contiguous() for name, tensor in on_host(factors.items()).items()}
        save_file(copies, beside / "adapter_model.safetensors")
