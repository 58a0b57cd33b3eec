import json

from treadle.conformance.report import about, as_json, heading, table
from treadle.conformance.run import CheckResult, ContractOutcome
from treadle.rollout.v1 import server_service_pb2 as srv

CHECKS = [
    CheckResult(
        part="updates", name="a corrupt chunk is refused", outcome=ContractOutcome.HOLDS, seen=""
    ),
    CheckResult(
        part="updates", name="x" * 90, outcome=ContractOutcome.FAILS, seen="an answer " * 100
    ),
    CheckResult(part="model", name="greedy", outcome=ContractOutcome.SKIPPED, seen="give --model"),
]
SERVER = srv.GetServerInfoResponse(
    engine="fake", engine_version="1", model=srv.ModelInfo(vocab_size=64, context_length=512)
)


def test_the_table_has_parts_outcomes_reasons_and_a_sum() -> None:
    lines = table(CHECKS).splitlines()
    assert lines[1] == "updates"
    assert lines[2].split() == ["a", "corrupt", "chunk", "is", "refused", "holds"]
    assert lines[3] == f"  {'x' * 90}  DOES NOT"
    assert lines[-1] == "1 hold, 1 do not, 1 skipped"
    assert "      give --model" in lines
    assert max(map(len, lines)) <= 118
    assert any(line.endswith(" ...") for line in lines), "what is very long is cut"


def test_the_json_has_everything_uncut() -> None:
    found = json.loads(as_json(about("a:1", SERVER), CHECKS))
    assert (found["holds"], found["does_not"], found["skipped"]) == (1, 1, 1)
    assert found["checks"][1]["seen"] == "an answer " * 100
    assert found["address"] == "a:1" and "64 ids, context 512" in heading("a:1", SERVER)
