"""The recipes for clusters, without a cluster: what they say parses, fits together and runs."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from treadle.trainer.config.load import load_config

ROOT = Path(__file__).parents[2]
_MANIFEST = ROOT / "deploy" / "kuberay" / "treadle.yaml"
_SCRIPT = ROOT / "deploy" / "slurm" / "treadle.sbatch"
_STAND_INS = {
    "srun": 'while [[ "$1" == --* ]]; do shift; done; exec "$@"',
    "scontrol": 'printf "%s\\n" first second third',
    "hostname": "echo 10.0.0.1 fd00::1",
    # A node of Ray runs until it is ended; the head answers once it has been started.
    "ray": "[[ $RAY_AUTH_MODE == token && ${#RAY_AUTH_TOKEN} == 64 ]] || exit 9; "
    'case "$1 $2" in "start --head") echo $$ > "$CALLS/head.pid" ;; '
    '"start --block") echo here > "$CALLS/joined" ;; '
    '"health-check --address") test -e "$CALLS/head.pid"; exit ;; esac; exec tail -f /dev/null',
    # The trainer waits for two nodes to join.
    "treadle": 'exec 3<> "$CALLS/joined"; read -ru 3; read -ru 3; exit "$STATUS"',
}


def _objects() -> Mapping[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all(_MANIFEST.read_text())}


def test_the_manifest_has_what_its_run_needs(tmp_path: Path) -> None:
    objects = _objects()
    spec = objects["RayCluster"]["spec"]
    locked = (ROOT / "3rdparty" / "python" / "default-cuda.lock.txt").read_text().splitlines()
    assert f"ray=={spec['rayVersion']}" in locked

    file = tmp_path / "run.yaml"
    file.write_text(objects["ConfigMap"]["data"]["run.yaml"])
    config = load_config([file], []).config
    assert config.launch.kind == "ray"
    assert config.launch.max_failures
    (workers,) = spec["workerGroupSpecs"]
    (worker,) = workers["template"]["spec"]["containers"]
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == config.launch.gpus_per_node
    assert workers["replicas"] == config.launch.nodes + 1

    (head,) = spec["headGroupSpec"]["template"]["spec"]["containers"]
    assert head["image"] == worker["image"]
    assert f"-t {head['image']} " in (ROOT / "docs" / "containers.md").read_text()
    for container in (head, worker):
        assert container["command"] == ["/bin/bash", "-c"]
        subprocess.run(["bash", "-n"], input=container["args"][0], text=True, check=True)
        assert {each["name"] for each in container["env"]} == {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"}
        for probe in ("livenessProbe", "readinessProbe"):  # else KubeRay asks Ray's dashboard
            assert container[probe]["exec"]["command"]
    mounts = {each["name"]: each["mountPath"] for each in head["volumeMounts"]}
    assert config.run.dir is not None and config.run.dir.is_relative_to(mounts["runs"])
    assert f"{mounts['run']}/run.yaml" in head["args"][0]
    volumes = {each["name"]: each for each in spec["headGroupSpec"]["template"]["spec"]["volumes"]}
    claim = volumes["runs"]["persistentVolumeClaim"]["claimName"]
    assert claim == objects["PersistentVolumeClaim"]["metadata"]["name"]
    assert volumes["run"]["configMap"]["name"] == objects["ConfigMap"]["metadata"]["name"]
    label = objects["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]
    assert label == {"ray.io/cluster": objects["RayCluster"]["metadata"]["name"]}


def _run(calls: Path, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Runs the script with stand-ins for what it calls, each of which notes its arguments."""
    bin_ = calls / "env" / "bin"
    bin_.mkdir(parents=True)
    os.mkfifo(calls / "joined")
    for name, body in _STAND_INS.items():
        file = bin_ / name
        file.write_text(f'#!/bin/bash\necho "{name} $*" >> "$CALLS/calls"\n{body}\n')
        file.chmod(0o755)
    given = {
        "RUN_DIR": "/runs/first",
        "TREADLE_ENV": str(bin_.parent),
        "SLURM_JOB_NUM_NODES": "3",
        "SLURM_JOB_NODELIST": "a[1-3]",
        "SLURM_JOB_ID": "123456",
        "SLURM_GPUS_ON_NODE": "4",
        "CALLS": str(calls),
        "STATUS": "0",
    }
    return subprocess.run(
        ["bash", str(_SCRIPT), *arguments],
        env={"PATH": os.environ["PATH"], **given, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("status", [0, 3])
def test_a_job_starts_ray_on_each_node_and_ends_with_the_trainer(
    tmp_path: Path, status: int
) -> None:
    ended = _run(tmp_path, "--config", "my run.yaml", STATUS=str(status))
    assert ended.returncode == status, ended.stderr
    calls = (tmp_path / "calls").read_text()
    head = "ray start --head --block --node-ip-address=10.0.0.1 --port=23456 --num-gpus=4"
    assert f"--nodelist=first {head}" in calls
    for host in ("second", "third"):
        joins = "ray start --block --address=10.0.0.1:23456 --num-gpus=4"
        assert f"srun --overlap --nodes=1 --ntasks=1 --nodelist={host} {joins}" in calls
    (trained,) = [line for line in calls.splitlines() if line.startswith("treadle ")]
    assert trained == (
        "treadle run.dir=/runs/first launch=ray launch.address=10.0.0.1:23456 launch.nodes=2 "
        "launch.gpus_per_node=4 launch.max_failures=3 --config my run.yaml"
    )
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "head.pid").read_text()), 0)
    arguments = trained.split()[1:6]
    assert load_config([], [*arguments, "model.path=/m", "data.train_files=a.jsonl"]).config


def test_a_job_that_cannot_work_says_so_before_it_starts_anything(tmp_path: Path) -> None:
    ended = _run(tmp_path, SPARE_NODES="3")
    assert ended.returncode == 2
    assert "SPARE_NODES=3 leaves none of 3 nodes to the run" in ended.stderr
    ended = _run(tmp_path / "other", RUN_DIR="")
    assert "set RUN_DIR to the run directory" in ended.stderr
    assert not (tmp_path / "calls").exists()
