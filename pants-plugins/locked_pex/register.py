"""`locked_pex`: a separate environment in one executable, with exactly the pins of a lock.

`pex_binary` resolves again: it takes pins from the lock and dependencies from the wheels. The locks
of the engines omit requirements of their wheels that a CPU does not have, so this target installs
the whole lock without resolving (pip's --no-deps) and adds the sources that it depends on. It runs
as a virtual environment, because engines start child processes through `sys.executable`.

    locked_pex(
        name="vllm",
        resolve="vllm",
        entry_point="treadle.rollout_server.main:main",
        dependencies=[":lib"],
    )

`./pants package` puts it into dist/, `./pants run` runs it, and a test that names it in
`runtime_package_dependencies` finds it in its sandbox.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from pants.backend.python.subsystems.setup import PythonSetup
from pants.backend.python.target_types import EntryPoint, PexLayout
from pants.backend.python.util_rules import pex
from pants.backend.python.util_rules.interpreter_constraints import InterpreterConstraints
from pants.backend.python.util_rules.pex import Pex, PexRequest
from pants.backend.python.util_rules.pex_environment import PythonExecutable
from pants.backend.python.util_rules.pex_requirements import EntireLockfile, Lockfile, Resolve
from pants.backend.python.util_rules.python_sources import (
    PythonSourceFilesRequest,
    StrippedPythonSourceFiles,
)
from pants.core.goals.package import (
    BuiltPackage,
    BuiltPackageArtifact,
    OutputPathField,
    PackageFieldSet,
)
from pants.core.goals.run import RunFieldSet, RunInSandboxBehavior, RunRequest
from pants.engine.rules import Get, collect_rules, rule
from pants.engine.target import (
    COMMON_TARGET_FIELDS,
    Dependencies,
    StringField,
    Target,
    TransitiveTargets,
    TransitiveTargetsRequest,
)
from pants.engine.unions import UnionRule
from pants.util.logging import LogLevel


# Not the field of python targets: what this depends on lives in the default resolve.
class LockedPexResolve(StringField):
    alias = "resolve"
    required = True
    help = "The resolve in [python.resolves] whose lock is installed as it is."


class LockedPexEntryPoint(StringField):
    alias = "entry_point"
    required = True
    help = "`module:function` that is called."


class LockedPexTarget(Target):
    alias = "locked_pex"
    core_fields = (
        *COMMON_TARGET_FIELDS,
        Dependencies,
        LockedPexResolve,
        LockedPexEntryPoint,
        OutputPathField,
    )
    help = "An executable environment with exactly what a lock names, and sources."


@dataclass(frozen=True)
class LockedPexFieldSet(PackageFieldSet, RunFieldSet):
    required_fields = (LockedPexResolve, LockedPexEntryPoint)
    run_in_sandbox_behavior = RunInSandboxBehavior.RUN_REQUEST_HERMETIC

    resolve: LockedPexResolve
    entry_point: LockedPexEntryPoint
    output_path: OutputPathField


@rule(desc="Build an environment from a lock", level=LogLevel.DEBUG)
async def package_locked_pex(
    field_set: LockedPexFieldSet, python_setup: PythonSetup
) -> BuiltPackage:
    resolve = field_set.resolve.value
    assert resolve is not None and field_set.entry_point.value is not None
    lockfile = await Get(Lockfile, Resolve(resolve, use_entire_lockfile=True))
    targets = await Get(TransitiveTargets, TransitiveTargetsRequest([field_set.address]))
    sources = await Get(StrippedPythonSourceFiles, PythonSourceFilesRequest(targets.closure))
    output_filename = field_set.output_path.value_or_default(file_ending="pex")
    constraints = InterpreterConstraints(python_setup.interpreter_constraints)
    # Apart from the sources, so that a change to these installs nothing anew.
    locked = await Get(
        Pex,
        PexRequest(
            output_filename=f"{resolve}-requirements.pex",
            internal_only=True,
            requirements=EntireLockfile(lockfile),
            interpreter_constraints=constraints,
            description=f"Install the lock of {resolve}",
        ),
    )
    built = await Get(
        Pex,
        PexRequest(
            output_filename=output_filename,
            internal_only=False,
            layout=PexLayout.PACKED,
            interpreter_constraints=constraints,
            main=EntryPoint.parse(field_set.entry_point.value),
            sources=sources.stripped_source_files.snapshot.digest,
            additional_inputs=locked.digest,
            additional_args=(
                f"--requirements-pex={locked.name}",
                "--venv=prepend",
                # Links between files, not to folders: libraries find their files by RECORD, which
                # Pex cuts down to the names that it links.
                "--venv-site-packages-copies",
                # What the lock leaves out is left out when it runs as well.
                "--ignore-errors",
                "--no-emit-warnings",
            ),
        ),
    )
    return BuiltPackage(built.digest, (BuiltPackageArtifact(output_filename),))


@rule(level=LogLevel.DEBUG)
async def run_locked_pex(field_set: LockedPexFieldSet, python_setup: PythonSetup) -> RunRequest:
    package = await Get(BuiltPackage, PackageFieldSet, field_set)
    python = await Get(
        PythonExecutable, InterpreterConstraints(python_setup.interpreter_constraints)
    )
    relpath = package.artifacts[0].relpath
    assert relpath is not None
    main = os.path.join("{chroot}", relpath, "__main__.py")
    return RunRequest(digest=package.digest, args=[python.path, main])


def target_types():
    return [LockedPexTarget]


def rules():
    return [
        *collect_rules(),
        *LockedPexFieldSet.rules(),
        *pex.rules(),
        UnionRule(PackageFieldSet, LockedPexFieldSet),
    ]
