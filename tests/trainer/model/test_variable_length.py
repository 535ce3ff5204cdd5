"""Which variable-length attention is used: FlashAttention 4 where it is installed, runs, and agrees with torch's."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from penstock.services.trainer.model.layers import attention, variable_length
from penstock.services.trainer.model.layers.variable_length import Variant
from tests.trainer.model.test_attention import loop_varlen

CAUSAL = Variant(4, 2, 16, torch.bfloat16, False, torch.device("cpu"))
WINDOWED = Variant(4, 2, 16, torch.bfloat16, True, torch.device("cpu"))


def flash4(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, None]:
    """FlashAttention 4's function, computed one sequence at a time."""
    left, right = options["window_size"]
    assert (left is None) == options["causal"]
    assert right in (None, 0)
    window = (-1 if left is None else left, 0)
    ends = (options[name] for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"))
    return loop_varlen(
        query, key, value, *ends, scale=options["softmax_scale"], window_size=window, enable_gqa=True
    ), None


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Install a FlashAttention 4 on a device of a compute capability."""

    def installed(function: Callable[..., Any], capability: int = 9) -> None:
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", loop_varlen)
        monkeypatch.setattr(variable_length, "is_installed", lambda: True)
        monkeypatch.setattr(variable_length, "_flash4", lambda: function)
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (capability, 0))

    variable_length.agrees.cache_clear()
    yield installed
    variable_length.agrees.cache_clear()


@pytest.mark.parametrize("variant", [CAUSAL, WINDOWED])
def test_kernels_that_agree_with_torch_are_used(variant: Variant, install: Callable[..., None]) -> None:
    install(flash4)
    assert variable_length.agrees(variant)


def test_kernels_are_compared_within_checkpointed_layers_too(install: Callable[..., None]) -> None:
    install(flash4)

    def layer(hidden: Tensor) -> Tensor:
        return hidden.exp().sin() if variable_length.agrees(CAUSAL) else hidden

    hidden = torch.tensor([0.5], requires_grad=True)
    out: Tensor = checkpoint(layer, hidden, use_reentrant=False)
    (gradient,) = torch.autograd.grad(out, hidden)
    assert float(gradient) == pytest.approx(-0.12835, abs=1e-5)  # cos(exp 0.5) · exp 0.5


def test_a_package_that_warns_of_its_own_compiler_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "flash_attn"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "cute.py").write_text(
        "import warnings\nwarnings.warn('deprecated', DeprecationWarning)\ndef flash_attn_varlen_func():\n"
        "    warnings.warn('Argument aux_data (position 17) cannot be converted', UserWarning)\n    return 4\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name, value in variable_length._CACHE.items():
        monkeypatch.setenv(name, value)
    variable_length._flash4.cache_clear()
    assert variable_length._flash4()() == 4
    variable_length._flash4.cache_clear()
    for name in ("flash_attn", "flash_attn.cute"):
        sys.modules.pop(name)


def fails(*_: Any, **__: Any) -> Any:
    raise RuntimeError("the compiler's versions do not fit")


def ignores_the_window(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, None]:
    return flash4(query, key, value, **{**options, "window_size": (None, None), "causal": True})


def wrong_gradients(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, None]:
    return flash4(query, key, value.detach() + 2 * (value - value.detach()), **options)


def not_a_number(query: Tensor, *others: Tensor, **options: Any) -> tuple[Tensor, None]:
    return flash4(query, *others, **options)[0] * torch.nan, None


def wrong_for_many(query: Tensor, *others: Tensor, **options: Any) -> tuple[Tensor, None]:
    many = len(options["cu_seqlens_q"]) > 257
    return flash4(query, *others, **options)[0] * (1.5 if many else 1.0), None


def wrong_where(fits: Callable[[int, int], bool]) -> Callable[..., tuple[Tensor, None]]:
    """Return a function that is wrong for some longest numbers of queries and keys."""

    def function(query: Tensor, *others: Tensor, **options: Any) -> tuple[Tensor, None]:
        is_wrong = fits(options["max_seqlen_q"], options["max_seqlen_k"])
        return flash4(query, *others, **options)[0] * (1.5 if is_wrong else 1.0), None

    return function


@pytest.mark.parametrize(
    "function",
    [
        fails,
        ignores_the_window,
        wrong_gradients,
        not_a_number,
        wrong_for_many,
        wrong_where(lambda queries, keys: queries > 64 and keys > 128),
        wrong_where(lambda queries, keys: queries <= 64 and keys > 128),
        wrong_where(lambda queries, keys: queries > 64 and keys <= 96),
        wrong_where(lambda queries, keys: 8 < queries <= 64 and keys <= 48),
        wrong_where(lambda queries, keys: queries <= 8),  # 16 heads of queries to one of keys make 128
    ],
)
def test_kernels_that_fail_or_differ_are_not_used(
    function: Callable[..., Any], install: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    install(function)
    assert not variable_length.agrees(WINDOWED)
    assert "FlashAttention 4 is not used" in caplog.text


def test_a_package_that_cannot_be_imported_is_not_used(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(flash4)
    monkeypatch.setattr(variable_length, "is_installed", fails)
    assert not variable_length.agrees(CAUSAL)


def test_older_gpus_are_left_to_torch(install: Callable[..., None]) -> None:
    install(flash4, capability=8)
    assert not variable_length.agrees(CAUSAL)


def test_deterministic_runs_are_left_to_torch(install: Callable[..., None]) -> None:
    install(flash4)
    torch.use_deterministic_algorithms(True)
    try:
        assert not variable_length.agrees(CAUSAL)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_run_of_torch_kernels_attends_by_torch() -> None:
    assert attention.kind_of("auto", "torch") == "torch"
    assert attention.kind_of("auto", "auto") == "auto"
    assert attention.kind_of("mask", "torch") == "mask"
