from treadle.policy.weight_sync.errors import OUTCOMES
from treadle.rollout.v1 import errors_pb2


def test_every_reason_of_the_contract_has_an_outcome() -> None:
    names = {name.removeprefix("ERROR_REASON_") for name, _ in errors_pb2.ErrorReason.items()}
    assert set(OUTCOMES) == names - {"UNSPECIFIED"}
