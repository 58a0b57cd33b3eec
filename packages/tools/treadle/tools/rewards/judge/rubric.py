"""Reads a rubric: the model that judges, and the criteria that it is asked about.

Invariant: an invalid rubric is a `SetupError` at start that names the file, the place and the
value. A placeholder in a question is one of `PLACEHOLDERS`; other braces are doubled.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from treadle.agent_loop import SetupError
from treadle.agent_loop.errors import did_you_mean
from treadle.tools.rewards.judge.verdicts import plain, verdict
from treadle.tools.yaml_config import mapping, read_yaml, section, string

__all__ = ["PLACEHOLDERS", "Criterion", "OpenAiAddress", "RolloutServers", "Rubric", "read_rubric"]

PLACEHOLDERS: Final = ("question", "answer", "ground_truth", "transcript")
_BRACES = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAiAddress:
    """A model behind an OpenAI-compatible address.

    Attributes:
        base_url: Base URL, for example http://127.0.0.1:8000/v1.
        api_key_variable: Environment variable that holds the key; None if no key is needed.
    """

    base_url: str
    name: str
    api_key_variable: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutServers:
    """A model on rollout servers.

    Attributes:
        path: Directory of the model's tokenizer and chat template.
        token_file: Holds the servers' token; None if they have none.
        root_certificates: PEM file; with it the connection uses TLS.
    """

    addresses: tuple[str, ...]
    path: Path
    token_file: Path | None = None
    root_certificates: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Criterion:
    """One question to the judge.

    Attributes:
        verdicts: The answers that the judge chooses from, and the score of each.
        weight: Weight of its score among those of the other criteria; above 0.
    """

    name: str
    question: str
    verdicts: Mapping[str, float]
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rubric:
    """A whole rubric.

    Attributes:
        criteria: There is at least one, never none.
        system: The judge's system message; None for none.
        accuracy: Name of the criterion whose best verdict means a right answer; None if no
            criterion does.
        max_tokens: Maximum length of a judgement, in tokens.
        timeout_s: Maximum duration of one attempt at a judgement.
        max_attempts: Requests for one judgement, counting answers without a verdict and, at an
            OpenAI-compatible address, what was not answered.
        max_concurrency: Maximum number of questions in flight.
        cache: SQLite file that keeps verdicts; None keeps them in memory.
    """

    model: OpenAiAddress | RolloutServers
    criteria: tuple[Criterion, ...]
    system: str | None = None
    accuracy: str | None = None
    temperature: float = 0.0
    max_tokens: int = 1024
    timeout_s: float = 60.0
    max_attempts: int = 4
    max_concurrency: int = 16
    cache: Path | None = None

    @property
    def reads_truth(self) -> bool:
        """A question holds the row's ground truth."""
        return any(
            match[1] == "ground_truth"
            for criterion in self.criteria
            for match in _BRACES.finditer(criterion.question)
        )


def read_rubric(path: Path) -> Rubric:
    """Reads a rubric file. Paths in it are relative to the file.

    Raises:
        SetupError: The file cannot be read, or a value in it is invalid.
    """
    where = f"the rubric {path}"
    fields = section(
        read_yaml(path, "rubric", literal=True),
        where,
        required=("model", "criteria"),
        optional=(
            "system",
            "accuracy",
            "temperature",
            "max_tokens",
            "timeout_s",
            "max_attempts",
            "max_concurrency",
            "cache",
        ),
    )
    given = fields["criteria"]
    if not isinstance(given, list) or not given:
        raise SetupError(f"{where}: criteria must be a non-empty list, got {given!r:.80}")
    criteria = tuple(
        _criterion(each, f"{where}: criteria[{number}]") for number, each in enumerate(given)
    )
    names = [criterion.name for criterion in criteria]
    if len(set(names)) < len(names):
        raise SetupError(f"{where}: two criteria have one name; names are: {', '.join(names)}")
    accuracy = _optional_string(fields, "accuracy", where)
    if accuracy is not None and accuracy not in names:
        raise SetupError(
            f"{where}: accuracy {accuracy!r} is not a criterion{did_you_mean(accuracy, names)}; "
            f"criteria are: {', '.join(names)}"
        )
    cache = _optional_string(fields, "cache", where)
    return Rubric(
        model=_model(fields["model"], f"{where}: model", path.parent),
        criteria=criteria,
        system=_optional_string(fields, "system", where),
        accuracy=accuracy,
        temperature=_number(fields, "temperature", 0.0, where, least=0.0),
        max_tokens=_count(fields, "max_tokens", 1024, where),
        timeout_s=_number(fields, "timeout_s", 60.0, where, least=0.001),
        max_attempts=_count(fields, "max_attempts", 4, where),
        max_concurrency=_count(fields, "max_concurrency", 16, where),
        cache=None if cache is None else path.parent / cache,
    )


def fill(question: str, values: Mapping[str, str]) -> str:
    """Returns the question with its placeholders replaced, in one pass: values are not read."""

    def replace(match: re.Match[str]) -> str:
        name = match[1]
        return match[0][0] if name is None else values[name]

    return _BRACES.sub(replace, question)


def _model(value: object, where: str, base: Path) -> OpenAiAddress | RolloutServers:
    if "servers" not in mapping(value, where):
        fields = section(
            value, where, required=("base_url", "name"), optional=("api_key_variable",)
        )
        return OpenAiAddress(
            base_url=string(fields["base_url"], f"{where}.base_url"),
            name=string(fields["name"], f"{where}.name"),
            api_key_variable=_optional_string(fields, "api_key_variable", where),
        )
    fields = section(
        value, where, required=("servers", "path"), optional=("token_file", "root_certificates")
    )
    servers = fields["servers"]
    if not isinstance(servers, list) or not servers:
        raise SetupError(f"{where}.servers must be a list of host:port, got {servers!r:.80}")
    token = _optional_string(fields, "token_file", where)
    roots = _optional_string(fields, "root_certificates", where)
    return RolloutServers(
        addresses=tuple(string(each, f"{where}.servers") for each in servers),
        path=base / string(fields["path"], f"{where}.path"),
        token_file=None if token is None else base / token,
        root_certificates=None if roots is None else base / roots,
    )


def _criterion(value: object, where: str) -> Criterion:
    fields = section(value, where, required=("name", "question", "verdicts"), optional=("weight",))
    question = string(fields["question"], f"{where}.question")
    for match in _BRACES.finditer(question):
        if match[0] in ("{{", "}}") or match[1] in PLACEHOLDERS:
            continue
        raise SetupError(
            f"{where}.question has {match[0]!r}{did_you_mean(match[1] or '', PLACEHOLDERS)}; "
            f"placeholders are: {', '.join(f'{{{name}}}' for name in PLACEHOLDERS)}; write other "
            "braces twice"
        )
    verdicts = fields["verdicts"]
    if isinstance(verdicts, Mapping) and any(isinstance(key, bool) for key in verdicts):
        raise SetupError(f'{where}.verdicts: YAML reads yes and no as booleans; write "yes", "no"')
    scores: dict[str, float] = {}
    written: dict[str, str] = {}
    for given, score in mapping(verdicts, f"{where}.verdicts").items():
        label = _label(given, f"{where}.verdicts")
        if same := verdict(f"Verdict: {label}", tuple(scores)):
            raise SetupError(
                f"{where}.verdicts has {given!r}, which cannot be told from {written[same]!r}: "
                "case, spaces and marks around an answer do not count. Remove or rename one"
            )
        written[label] = given
        scores[label] = _score(score, f"{where}.verdicts")
    if len(scores) < 2:
        raise SetupError(f"{where}.verdicts must have at least two answers, got {verdicts!r:.80}")
    return Criterion(
        name=string(fields["name"], f"{where}.name"),
        question=question,
        verdicts=scores,
        weight=_number(fields, "weight", 1.0, where, least=1e-9),
    )


def _label(label: str, where: str) -> str:
    folded = " ".join(label.split()).casefold()
    if not plain(folded):
        raise SetupError(
            f"{where}: the answer {label!r} has no letter, number or symbol of its own"
        )
    if verdict(f"Verdict: {folded}", (folded,)) is None:
        raise SetupError(
            f"{where}: the answer {label!r} could not be read from a line 'Verdict: {label}'; "
            "write it as one plain word"
        )
    return folded


def _score(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise SetupError(f"{where}: a score must be a finite number, got {value!r}")
    return float(value)


def _number(
    fields: Mapping[str, object], key: str, default: float, where: str, *, least: float
) -> float:
    value = fields.get(key, default)
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not (math.isfinite(value) and value >= least)
    ):
        raise SetupError(
            f"{where}: {key} must be a number of at least {least:g}, and finite, got {value!r}"
        )
    return float(value)


def _count(fields: Mapping[str, object], key: str, default: int, where: str) -> int:
    value = fields.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SetupError(f"{where}: {key} must be a whole number of at least 1, got {value!r}")
    return value


def _optional_string(fields: Mapping[str, object], key: str, where: str) -> str | None:
    value = fields.get(key)
    return None if value is None else string(value, f"{where}: {key}")
