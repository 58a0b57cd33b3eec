from against_commit import figures


def test_figures_are_named_by_their_place_and_lists_become_medians() -> None:
    results = {
        "busy": [
            {"server": {"calls_s": 1, "ok": True}, "name": "a"},
            {"server": {"calls_s": 5, "ok": True}, "name": "b"},
            {"server": {"calls_s": 2.5, "ok": False}, "name": "c"},
        ],
        "spread": [3, 1, 2],
        "nothing": [],
        "missing": None,
    }
    assert dict(figures(results)) == {"busy.server.calls_s": 2.5, "spread": 2.0}
