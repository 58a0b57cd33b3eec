from pathlib import Path

from treadle.rollout_server.doctor.container import memory_bytes, processors


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_without_limits_there_is_none(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    assert memory_bytes(tmp_path, membership) is processors(tmp_path, membership) is None
    membership.write_text("0::/\n")
    stat = "inactive_file 90"
    write(tmp_path, memory__max="max", memory__current="7", memory__stat=stat)
    write(tmp_path, cpu__max="max 100000")
    assert memory_bytes(tmp_path, membership) is processors(tmp_path, membership) is None


def test_the_tightest_limit_around_the_process_counts(tmp_path: Path) -> None:
    groups, membership = tmp_path / "groups", tmp_path / "cgroup"
    membership.write_text("0::/pod/box\n")
    stat = "anon 600\ninactive_file 90"
    write(groups / "pod", memory__max="1000", memory__current="700", memory__stat=stat)
    write(groups / "pod/box", memory__max="9000", memory__current="700", memory__stat=stat)
    write(groups / "pod", cpu__max="150000 100000")
    write(groups / "pod/box", cpu__max="max 100000")
    assert memory_bytes(groups, membership) == 390
    assert processors(groups, membership) == 2
    # Seen from inside the container, its own group is the root.
    membership.write_text("0::/\n")
    assert memory_bytes(groups / "pod", membership) == 390


def test_version_1_has_a_tree_for_each_controller(tmp_path: Path) -> None:
    groups, membership = tmp_path / "groups", tmp_path / "cgroup"
    membership.write_text("4:memory:/box\n1:cpu,cpuacct:/box\n0::/\n")
    write(
        groups / "memory/box",
        memory__limit_in_bytes="1000",
        memory__usage_in_bytes="700",
        memory__stat="inactive_file 1\ntotal_inactive_file 90",
    )
    write(groups / "cpu/box", cpu__cfs_quota_us="400000", cpu__cfs_period_us="100000")
    write(groups / "cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert memory_bytes(groups, membership) == 390
    assert processors(groups, membership) == 4
