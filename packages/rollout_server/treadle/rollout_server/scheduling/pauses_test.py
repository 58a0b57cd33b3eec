from treadle.rollout_server.scheduling.pauses import Pauses
from treadle.rollout_server.testing import FakeClock


def test_a_call_sees_the_parts_of_pauses_within_its_time() -> None:
    clock = FakeClock(10.0)
    pauses = Pauses(clock)
    before = pauses.last
    pauses.begin()
    pauses.begin()
    clock.advance(2)  # 10 to 12
    during = pauses.last
    pauses.end()
    pauses.end()
    clock.advance(3)
    pauses.begin()  # since 15
    clock.advance(5)
    assert list(before.since(9, 20)) == [(10, 12), (15, 20)]
    assert list(during.since(11, 20)) == [(11, 12), (15, 20)]
    assert list(during.since(12, 15)) == []
    assert list(pauses.last.since(16, 17)) == [(16, 17)]
