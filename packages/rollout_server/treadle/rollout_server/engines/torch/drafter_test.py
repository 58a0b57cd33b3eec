from random import Random

from treadle.rollout_server.engines.torch.drafter import Drafter, Drafting

PROMPT = list(range(100, 130))


def begun(drafter: Drafter, prompt: list[int] = PROMPT) -> Drafting:
    return drafter.begin(prompt, 0)


def follow(drafter: Drafter, drafting: Drafting, completion: list[int], room: int = 99) -> int:
    """Samples a completion as the engine does; returns the number of passes."""
    passes = done = 0
    while done < len(completion):
        drafter.propose(drafting, min(room, len(completion) - done - 1))
        kept = 1
        for drafted, sampled in zip(drafting.draft, completion[done:], strict=False):
            if drafted != sampled:
                break
            kept += 1
        drafter.observe(drafting, completion[done : done + kept])
        done += kept
        passes += 1
    return passes


def test_a_sibling_takes_few_passes() -> None:
    drafter = Drafter(8)
    completion = list(range(200, 240))
    assert follow(drafter, begun(drafter), completion) == 40
    for _ in range(5):
        follow(drafter, begun(drafter), completion)
    assert follow(drafter, begun(drafter), completion) <= 6
    assert drafter.num_accepted == drafter.num_drafted


def test_what_a_tool_said_is_copied() -> None:
    drafter = Drafter(8)
    said = list(range(300, 320))
    for _ in range(4):
        follow(drafter, begun(drafter, [*said, *PROMPT]), said)
    fresh = [400 + i for i in range(20)]
    passes = follow(drafter, begun(drafter, [*fresh, *PROMPT, *fresh[:5]]), fresh[5:])
    assert passes <= 5


def test_text_that_does_not_repeat_is_not_drafted() -> None:
    drafter = Drafter(8)
    draws = Random(0)
    for _ in range(30):  # The same few ids in random order: short n-grams repeat.
        follow(drafter, begun(drafter), [draws.randrange(4) for _ in range(60)])
    before = drafter.num_drafted
    follow(drafter, begun(drafter), [draws.randrange(4) for _ in range(100)])
    assert drafter.num_drafted - before <= 10


def test_it_drafts_again_once_text_repeats() -> None:
    drafter = Drafter(8)
    draws = Random(0)
    for _ in range(30):
        follow(drafter, begun(drafter), [draws.randrange(4) for _ in range(60)])
    completion = list(range(200, 260))
    passes = [follow(drafter, begun(drafter), completion) for _ in range(40)]
    assert passes[0] == 60
    assert passes[-1] <= 12


def test_a_draft_has_no_more_tokens_than_there_is_room_for() -> None:
    drafter = Drafter(8)
    for _ in range(10):
        follow(drafter, begun(drafter), list(range(200, 240)))
    drafting = begun(drafter)
    drafter.propose(drafting, 8)
    assert drafting.draft == list(range(200, 208))
    for room in (3, 0):
        drafter.propose(drafting, room)
        assert drafting.draft == list(range(200, 200 + room))
