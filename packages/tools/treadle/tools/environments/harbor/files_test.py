"""What a COPY finds, and what of a room's files arrives."""

import io
import tarfile
from pathlib import Path

import pytest

from treadle.tools.environments.harbor.files import find_sources, pack_command, unpack
from treadle.tools.environments.harbor.image import UnsupportedTaskError
from treadle.tools.sandbox.room import Room
from treadle.tools.sandbox.testing import why_no_user_namespaces


def test_a_copy_finds_folders_patterns_and_what_links_stand_for(tmp_path: Path) -> None:
    folder = tmp_path / "environment"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "a.txt").write_text("a")
    (folder / "link").symlink_to("data/a.txt")
    for whole in (".", "./", "/"):
        assert find_sources(folder, whole) == [("environment", folder)]
    assert find_sources(folder, "./data/*.txt") == [("a.txt", folder / "data" / "a.txt")]
    assert find_sources(folder, "link") == [("link", folder / "data" / "a.txt")]
    with pytest.raises(UnsupportedTaskError, match="there is no b in "):
        find_sources(folder, "b")
    (folder / "nowhere").symlink_to("none")
    with pytest.raises(UnsupportedTaskError, match="there is no nowhere in "):
        find_sources(folder, "nowhere")
    (folder / "out").symlink_to("/etc/hostname")
    with pytest.raises(UnsupportedTaskError, match=r"out is a link to /etc/hostname, .*copy the"):
        find_sources(folder, "out")


def test_a_member_that_cannot_be_unpacked_loses_no_other(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, kind, target in (
            ("absolute", tarfile.SYMTYPE, "/etc/passwd"),
            ("outside", tarfile.SYMTYPE, "../../x"),
            ("missing", tarfile.LNKTYPE, "none"),
            ("pipe", tarfile.FIFOTYPE, ""),
            ("../above", tarfile.REGTYPE, ""),
            ("reward.txt", tarfile.REGTYPE, ""),
        ):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, target
            archive.addfile(member)
    unpack(buffer.getvalue(), tmp_path / "in")
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("**/*")] == [
        "in",
        "in/reward.txt",
    ]


@pytest.mark.asyncio
@pytest.mark.timeout(60)
@pytest.mark.skipif(why_no_user_namespaces() is not None, reason=str(why_no_user_namespaces()))
async def test_files_that_cannot_be_read_in_a_room_lose_no_other(tmp_path: Path) -> None:
    leave = """\
mkdir -p /logs/closed; cd /logs; echo 1 > reward.txt; echo x > closed/x; echo y > unread
ln -s /etc/passwd link; ln unread twin; mkfifo pipe; chmod 000 closed unread
yes > grows &"""
    async with Room() as room:
        await room.run(["bash", "-c", leave])
        read = await room.run(pack_command("/logs"), timeout_s=20)
        assert read.return_code in (0, 1), read.stderr
    unpack(read.stdout, tmp_path / "logs")
    assert (tmp_path / "logs" / "reward.txt").read_text() == "1\n"
