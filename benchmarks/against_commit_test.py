from pathlib import Path

from against_commit import figures, run_once

SCRIPT = """
import argparse, json, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("--json")
parser.add_argument("rest", nargs="*")
given = parser.parse_args()
pathlib.Path(given.json).write_text(json.dumps({"rest": len(given.rest)}))
"""


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


def test_options_of_a_script_may_end_with_those_of_its_server(tmp_path: Path) -> None:
    for directory in ("benchmarks", "packages", "proto"):
        (tmp_path / directory).mkdir()
    (tmp_path / "benchmarks" / "script.py").write_text(SCRIPT)
    assert run_once(tmp_path, "script.py", "--json", ["--", "--threads", "1"]) == {"rest": 2.0}
