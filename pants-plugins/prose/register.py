"""`lint` of prose: spelling, the words of docs/vocabulary.md, entries of docstrings, class names.

Spelling and words are checked in every Python and Markdown file that `lint` was given, whatever
target owns it; docstrings in the modules of `packages/` that are no tests. The names of classes are
compared over all of those, whichever `lint` was given: a name can be taken anywhere. codespell's
settings are in `[tool.codespell]` of the root pyproject.toml.
"""

from __future__ import annotations

from typing import Any

import check_names
from check_docstrings import findings
from check_vocabulary import PAGE, Vocabulary
from pants.backend.python.subsystems.python_tool_base import PythonToolBase
from pants.backend.python.target_types import ConsoleScript
from pants.backend.python.util_rules import pex
from pants.backend.python.util_rules.pex import PexRequest, VenvPex, VenvPexProcess
from pants.core.goals.lint import LintFilesRequest, LintResult, Partitions
from pants.engine.fs import Digest, DigestContents, MergeDigests, PathGlobs
from pants.engine.process import FallibleProcessResult
from pants.engine.rules import Get, MultiGet, collect_rules, rule
from pants.option.option_types import ArgsListOption, SkipOption
from pants.option.subsystem import Subsystem
from pants.util.logging import LogLevel
from pants.util.strutil import pluralize

SUFFIXES = (".md", ".py")


class Codespell(PythonToolBase):
    options_scope = "codespell"
    name = "codespell"
    help = "Checks the spelling (https://github.com/codespell-project/codespell)."

    default_version = "codespell"
    default_requirements = [default_version]
    default_main = ConsoleScript("codespell")
    register_interpreter_constraints = True
    default_interpreter_constraints = ["CPython==3.11.*"]
    # Never read: [codespell].install_from_resolve is set in pants.toml.
    default_lockfile_resource = ("prose", "unused.lock")

    skip = SkipOption("lint")
    args = ArgsListOption(example="--quiet-level=2")


class VocabularySubsystem(Subsystem):
    options_scope = "vocabulary"
    name = "vocabulary"
    help = f"Finds the words that {PAGE} asks not to use."

    skip = SkipOption("lint")


class DocstringsSubsystem(Subsystem):
    options_scope = "docstrings"
    name = "docstrings"
    help = "Finds entries of docstrings that say nothing."

    skip = SkipOption("lint")


class NamesSubsystem(Subsystem):
    options_scope = "class-names"
    name = "class-names"
    help = "Finds public classes of one name in several modules."

    skip = SkipOption("lint")


class CodespellRequest(LintFilesRequest):
    tool_subsystem = Codespell


class VocabularyRequest(LintFilesRequest):
    tool_subsystem = VocabularySubsystem


class DocstringsRequest(LintFilesRequest):
    tool_subsystem = DocstringsSubsystem


class NamesRequest(LintFilesRequest):
    tool_subsystem = NamesSubsystem


def _prose(files: tuple[str, ...], *, skip: bool) -> Partitions[str, Any]:
    chosen = () if skip else tuple(file for file in files if file.endswith(SUFFIXES))
    return Partitions.single_partition(chosen) if chosen else Partitions()


@rule
async def partition_codespell(
    request: CodespellRequest.PartitionRequest, tool: Codespell
) -> Partitions[str, Any]:
    return _prose(request.files, skip=tool.skip)


@rule
async def partition_vocabulary(
    request: VocabularyRequest.PartitionRequest, tool: VocabularySubsystem
) -> Partitions[str, Any]:
    return _prose(request.files, skip=tool.skip)


@rule
async def partition_docstrings(
    request: DocstringsRequest.PartitionRequest, tool: DocstringsSubsystem
) -> Partitions[str, Any]:
    modules = tuple(
        file
        for file in request.files
        if file.startswith("packages/")
        and file.endswith(".py")
        and not file.endswith(("_test.py", "conftest.py"))
    )
    return _prose(modules, skip=tool.skip)


@rule
async def partition_names(
    request: NamesRequest.PartitionRequest, tool: NamesSubsystem
) -> Partitions[str, Any]:
    return _prose(tuple(filter(check_names.is_checked, request.files)), skip=tool.skip)


@rule(desc="Check the spelling", level=LogLevel.DEBUG)
async def codespell(request: CodespellRequest.Batch[str, Any], tool: Codespell) -> LintResult:
    tool_pex, files, config = await MultiGet(
        Get(VenvPex, PexRequest, tool.to_pex_request()),
        Get(Digest, PathGlobs(request.elements)),
        Get(Digest, PathGlobs(["pyproject.toml"])),
    )
    input_digest = await Get(Digest, MergeDigests((files, config)))
    result = await Get(
        FallibleProcessResult,
        VenvPexProcess(
            tool_pex,
            argv=(*tool.args, *request.elements),
            input_digest=input_digest,
            description=f"Run codespell on {pluralize(len(request.elements), 'file')}.",
            level=LogLevel.DEBUG,
        ),
    )
    return LintResult.create(request, result)


@rule(desc="Check the vocabulary", level=LogLevel.DEBUG)
async def vocabulary(
    request: VocabularyRequest.Batch[str, Any], tool: VocabularySubsystem
) -> LintResult:
    page, contents = await MultiGet(
        Get(DigestContents, PathGlobs([PAGE])),
        Get(DigestContents, PathGlobs(request.elements)),
    )
    words = Vocabulary(page[0].content.decode())
    found = [
        finding for file in contents for finding in words.findings(file.path, file.content.decode())
    ]
    return LintResult(1 if found else 0, "\n".join(found), "", tool.options_scope)


@rule(desc="Check the docstrings", level=LogLevel.DEBUG)
async def docstrings(
    request: DocstringsRequest.Batch[str, Any], tool: DocstringsSubsystem
) -> LintResult:
    contents = await Get(DigestContents, PathGlobs(request.elements))
    found = [each for file in contents for each in findings(file.path, file.content.decode())]
    return LintResult(1 if found else 0, "\n".join(found), "", tool.options_scope)


@rule(desc="Check the names of classes", level=LogLevel.DEBUG)
async def names(request: NamesRequest.Batch[str, Any], tool: NamesSubsystem) -> LintResult:
    contents = await Get(DigestContents, PathGlobs(["packages/**/*.py"]))
    modules = [(f.path, f.content.decode()) for f in contents if check_names.is_checked(f.path)]
    found = list(check_names.findings(modules))
    return LintResult(1 if found else 0, "\n".join(found), "", tool.options_scope)


def rules():
    return [
        *collect_rules(),
        *CodespellRequest.rules(),
        *VocabularyRequest.rules(),
        *DocstringsRequest.rules(),
        *NamesRequest.rules(),
        *pex.rules(),
    ]
