"""The engine contract against a server that runs SGLang."""

import pytest
from engines.remote_model_contract import WorkerContract
from engines.shared_call import check_shared_call

from treadle.conformance.contracts.remote_contract import Target

ENGINE = "sglang"
MODELS = "tiny_models"
# Prompts of 64 ids and more are read in several steps.
ARGUMENTS = ("--model.max_num_batched_tokens", "64")


@pytest.mark.asyncio
async def test_completions_that_share_a_call_are_those_of_single_calls(target: Target) -> None:
    await check_shared_call(target.address)


class TestSglangServer(WorkerContract):
    continue_recomputes = True
