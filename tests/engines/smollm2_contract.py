"""A part of the engine contract with a real model, in sizes that are fast enough on a CPU.

What needs neither a real vocabulary nor many layers, the contract shows with a tiny model.
"""

from pathlib import Path

import pytest

from treadle.conformance.contracts.control_contract import ControlContract
from treadle.conformance.contracts.model_contract import ModelComparison
from treadle.conformance.contracts.remote_contract import RemoteContract
from treadle.conformance.contracts.sampling_contract import SamplingContract


@pytest.mark.asyncio
class SmolContract(RemoteContract, ModelComparison):
    """The comparison with transformers, and the tests that need a real vocabulary."""

    fresh = False
    long = 64
    compared = 8
    longest_prompt = 200
    turn_tokens = 300
    # Thirty layers accumulate more rounding errors than two.
    model_tolerance = 2e-3
    logprob_tolerance = 2e-3

    def checkpoint(self, which: int) -> Path:
        assert self.target.checkpoints is not None
        return self.target.checkpoints[which]

    test_seeds_repeat_and_differ = SamplingContract.test_seeds_repeat_and_differ
    test_a_seeded_sequence_goes_on_from_its_middle = (
        SamplingContract.test_a_seeded_sequence_goes_on_from_its_middle
    )
    test_logprobs_are_those_of_the_constrained_distribution = (
        SamplingContract.test_logprobs_are_those_of_the_constrained_distribution
    )
    test_required_tags_are_all_that_is_sampled = (
        SamplingContract.test_required_tags_are_all_that_is_sampled
    )
    test_a_constraint_that_nothing_can_read_ends_only_its_own_sequence = (
        SamplingContract.test_a_constraint_that_nothing_can_read_ends_only_its_own_sequence
    )
    test_a_constraint_holds_over_an_update = SamplingContract.test_a_constraint_holds_over_an_update
    test_a_logprob_is_that_among_the_ids_of_its_sampling_mask = (
        SamplingContract.test_a_logprob_is_that_among_the_ids_of_its_sampling_mask
    )
    test_a_second_turn_finds_the_first_in_the_cache = (
        ControlContract.test_a_second_turn_finds_the_first_in_the_cache
    )
