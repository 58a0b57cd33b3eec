from treadle.trainer.weight_sync.errors import OUTCOMES, all_reasons


def test_every_reason_of_the_contract_has_an_outcome() -> None:
    assert set(OUTCOMES) == set(all_reasons())
