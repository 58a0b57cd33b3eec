"""The doctor's command line: gathers facts, checks them and prints the findings.

The exit code is 0 if no check fails, 1 if one does, and 2 if the options are invalid.
"""

import json
import sys
from collections.abc import Sequence

from treadle.rollout_server.config.command_line import ServerConfigError, parse
from treadle.rollout_server.doctor.environment import check_environment
from treadle.rollout_server.doctor.facts import Facts, gather
from treadle.rollout_server.doctor.host import check_host
from treadle.rollout_server.doctor.model import check_model
from treadle.tracing.diagnosis import Diagnosis, Level, as_table

_PROGRAM = "python -m treadle.rollout_server.doctor"
_HELP = f"""usage: {_PROGRAM} [--json] [options of the server]

Checks whether a server with these options can run here, and says how to fix what fails.
--json prints the findings as a JSON array. The options are those of
python -m treadle.rollout_server --help; pass the ones that the server will get.

Exit code 0: no check fails. 1: a check fails. 2: the options are invalid.
"""


def main(argv: Sequence[str]) -> int:
    """Runs the doctor; returns the exit code."""
    if "--help" in argv or "-h" in argv:
        sys.stdout.write(_HELP)
        return 0
    try:
        config = parse([word for word in argv if word != "--json"])
    except ServerConfigError as error:
        sys.stderr.write(f"{_PROGRAM}: {error}\n")
        return 2
    findings = examine(gather(config))
    as_json = "--json" in argv
    if as_json:
        text = json.dumps([finding.as_json() for finding in findings], indent=1)
    else:
        text = as_table({f"engine {config.engine}": findings})
    sys.stdout.write(f"{text}\n")
    return int(any(finding.level is Level.FAIL for finding in findings))


def examine(facts: Facts) -> list[Diagnosis]:
    """Runs all checks; returns the findings in the order of the output."""
    return [*check_environment(facts), *check_host(facts), *check_model(facts)]
