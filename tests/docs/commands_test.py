"""The commands of every page are understood as they stand: options, keys, values and files."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from treadle.trainer.main import main

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/*.md", "examples/*/*.md", "packages/**/*.md")
    for page in ROOT.glob(pattern)
    if page.name != "CHANGELOG.md"
)
# How the trainer is started: installed, with modules of yours, as a module, from a checkout.
TRAINER = re.compile(
    r"((PYTHONPATH=\S+ )?treadle|python -m treadle\.trainer\.main"
    r"|\./pants run (packages/trainer|examples):main( --)?)(?P<arguments>( .*)?)"
)
SCRIPT = re.compile(r"python (?P<script>examples/\S+\.py)(?P<arguments>.*)")
TEMPLATE = ROOT / "packages/trainer/treadle/trainer/template/config.yaml"


def lines(page: Path) -> Iterator[str]:
    """Yields the lines of the page's blocks of commands, continued ones joined."""
    blocks = re.findall(r"^```(?:bash|console|sh)?\n(.*?)^```", page.read_text(), re.M | re.S)
    for line in "".join(blocks).replace("\\\n", " ").splitlines():
        yield from (part.strip() for part in line.removeprefix("$ ").split("&&"))


def commands(what: re.Pattern[str]) -> list[tuple[str, str, re.Match[str]]]:
    """Returns (page, line, match) of each command; one that stands on several pages comes once."""
    found = {line: page for page in PAGES for line in lines(page)}
    return [
        (str(page.relative_to(ROOT)), line, match)
        for line, page in found.items()
        if (match := what.fullmatch(line)) and " ... " not in line
    ]


def of_the_trainer() -> Iterator[tuple[str, str, list[str]]]:
    for page, line, match in commands(TRAINER):
        yield page, line, shlex.split(match["arguments"], comments=True)


def trains(arguments: list[str]) -> bool:
    return not arguments or arguments[0].startswith("-") or "=" in arguments[0]


TRAINING = [
    pytest.param(arguments, id=f"{page}: {line}")
    for page, line, arguments in of_the_trainer()
    if trains(arguments)
]
OTHERS = [
    pytest.param(arguments[0], arguments[1:], id=f"{page}: {line}")
    for page, line, arguments in of_the_trainer()
    if not trains(arguments)
]
SCRIPTS = [
    pytest.param(match["script"], match["arguments"], id=f"{page}: {line}")
    for page, line, match in commands(SCRIPT)
]


def test_commands_of_each_kind_are_found() -> None:
    # Otherwise a change of the pages could leave the tests below without a case.
    assert len(TRAINING) >= 15
    assert {param.values[0] for param in OTHERS} >= {"eval", "export", "new", "report", "sft"}
    assert len(SCRIPTS) >= 2


@pytest.mark.parametrize("arguments", TRAINING)
def test_the_trainer_understands_a_command(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    # A file that is not in the repository is the one that the reader was led to make.
    given = [
        str(TEMPLATE) if before == "--config" and not (ROOT / argument).is_file() else argument
        for before, argument in zip(["", *arguments], arguments, strict=False)
        if argument != "--dry-run"
    ]
    assert main([*given, "--print-config"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(("command", "arguments"), OTHERS)
def test_a_command_has_the_options_of_the_page(
    command: str, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: object = main([command, "--help"])
    except SystemExit as exit_:
        status = exit_.code
    assert status == 0
    known = capsys.readouterr().out
    for argument in arguments:
        assert not argument.startswith("--") or re.search(rf"{argument}\b", known), known


@pytest.mark.parametrize(("script", "arguments"), SCRIPTS)
def test_a_script_of_an_example_has_the_options_of_the_page(script: str, arguments: str) -> None:
    source = (ROOT / script).read_text()
    for option in re.findall(r"--\w+", arguments):
        assert f'"{option}"' in source
