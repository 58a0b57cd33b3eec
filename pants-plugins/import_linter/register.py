"""`lint` with import-linter: the layers of the packages, over whole chains of imports.

Contracts are in `[tool.importlinter]` of the root pyproject.toml. Unlike other linters, this one
checks the whole import graph for any targets, because an edge anywhere can complete a
forbidden chain. Tests are excluded; the `__dependencies_rules__` of the BUILD files restrict what
they import directly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pants.backend.python.subsystems.python_tool_base import PythonToolBase
from pants.backend.python.target_types import (
    ConsoleScript,
    PythonSourceField,
    PythonTestSourceField,
)
from pants.backend.python.util_rules import pex
from pants.backend.python.util_rules.pex import PexRequest, VenvPex, VenvPexProcess
from pants.core.goals.lint import LintResult, LintTargetsRequest
from pants.core.util_rules.partitions import PartitionerType
from pants.core.util_rules.source_files import SourceFiles, SourceFilesRequest
from pants.engine.fs import Digest, MergeDigests, PathGlobs
from pants.engine.process import FallibleProcessResult
from pants.engine.rules import Get, MultiGet, collect_rules, rule
from pants.engine.target import AllTargets, FieldSet
from pants.option.option_types import ArgsListOption, SkipOption, StrListOption
from pants.source.source_root import SourceRootsRequest, SourceRootsResult
from pants.util.logging import LogLevel


class ImportLinter(PythonToolBase):
    options_scope = "import-linter"
    name = "import-linter"
    help = "Checks which modules may import which (https://import-linter.readthedocs.io)."

    default_version = "import-linter"
    default_requirements = [default_version]
    default_main = ConsoleScript("lint-imports")
    register_interpreter_constraints = True
    default_interpreter_constraints = ["CPython==3.11.*"]
    # Never read: [import-linter].install_from_resolve is set in pants.toml.
    default_lockfile_resource = ("import_linter", "unused.lock")

    skip = SkipOption("lint")
    args = ArgsListOption(example="--verbose")
    source_roots = StrListOption(
        default=["packages/", "proto"],
        help="Source roots whose modules are in the graph; with a final slash, a folder of them.",
    )

    def covers(self, source_root: str) -> bool:
        return any(
            source_root.startswith(entry) if entry.endswith("/") else source_root == entry
            for entry in self.source_roots
        )


@dataclass(frozen=True)
class ImportLinterFieldSet(FieldSet):
    required_fields = (PythonSourceField,)

    source: PythonSourceField


class ImportLinterRequest(LintTargetsRequest):
    field_set_type = ImportLinterFieldSet
    tool_subsystem = ImportLinter
    partitioner_type = PartitionerType.DEFAULT_SINGLE_PARTITION


@rule(desc="Lint the import graph", level=LogLevel.DEBUG)
async def lint_imports(
    request: ImportLinterRequest.Batch[ImportLinterFieldSet, Any],
    tool: ImportLinter,
    all_targets: AllTargets,
) -> LintResult:
    sources = await Get(
        SourceFiles,
        SourceFilesRequest(
            target[PythonSourceField]
            for target in all_targets
            if target.has_field(PythonSourceField) and not target.has_field(PythonTestSourceField)
        ),
    )
    roots, tool_pex, config = await MultiGet(
        Get(SourceRootsResult, SourceRootsRequest, SourceRootsRequest.for_files(sources.files)),
        Get(VenvPex, PexRequest, tool.to_pex_request()),
        Get(Digest, PathGlobs(["pyproject.toml"])),
    )
    search_path = sorted({r.path for r in roots.path_to_root.values() if tool.covers(r.path)})
    input_digest = await Get(Digest, MergeDigests((sources.snapshot.digest, config)))
    result = await Get(
        FallibleProcessResult,
        VenvPexProcess(
            tool_pex,
            argv=("--no-cache", *tool.args),
            input_digest=input_digest,
            extra_env={"PEX_EXTRA_SYS_PATH": ":".join(search_path)},
            description="Run import-linter on the whole import graph.",
            level=LogLevel.DEBUG,
        ),
    )
    return LintResult.create(request, result, strip_chroot_path=True)


def rules():
    return [*collect_rules(), *ImportLinterRequest.rules(), *pex.rules()]
