"""What of a Dockerfile is honoured, and what is refused in which words."""

from pathlib import Path

import pytest

from treadle.tools.environments.harbor import image
from treadle.tools.environments.harbor.image import (
    TaskImage,
    UnsupportedTaskError,
    check_script,
    read_image,
)


def _read(folder: Path, text: str, *, network: bool = False) -> TaskImage:
    (folder / "Dockerfile").write_text(text)
    return read_image(folder, None, images=["my/image"], network=network)


def test_what_is_done_when_a_room_opens(tmp_path: Path) -> None:
    read = _read(
        tmp_path,
        """\
# A comment.
FROM python:3.12-slim
ENV PLACE=/data A="b c"
ENV OLD form of it
WORKDIR $PLACE
COPY --chown=root:root a.txt \\
     b.txt ${PLACE}/in
WORKDIR sub
RUN mkdir x && \\
    echo "$A" > x/y
RUN ["touch", "z"]
EXPOSE 80
USER root
CMD ["sleep", "1"]
""",
    )
    copied, made, touched = read.steps
    assert (copied.copied, copied.workdir) == (("a.txt", "b.txt", "/data/in/"), "/data")
    assert made.command[:2] == ("/bin/sh", "-c") and 'echo "$A" > x/y' in made.command[2]
    assert touched.command == ("touch", "z")
    assert read.workdir == touched.workdir == "/data/sub"
    assert read.environment == {"PLACE": "/data", "A": "b c", "OLD": "form of it"}


def test_packages_that_this_machine_has_are_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image, "_has_package", lambda name: name in ("tmux", "git"))
    install = "RUN apt-get update && apt-get install -y --no-install-recommends {} \\\n"
    end = "    && rm -rf /var/lib/apt/lists/*\n"
    assert _read(tmp_path, f"FROM debian:12\n{install.format('tmux git=1.2')}{end}").steps == ()
    with pytest.raises(UnsupportedTaskError, match="this machine lacks asciinema, "):
        _read(tmp_path, f"FROM debian:12\n{install.format('tmux asciinema')}{end}")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("FROM nvidia/cuda:12\n", "'FROM nvidia/cuda:12' is not a plain system"),
        ("FROM debian\nFROM debian\n", "not one FROM"),
        ("FROM debian AS a\nRUN pip install x\n", "'RUN pip install x', which needs the network"),
        ("FROM debian\nRUN --mount=type=cache x\n", "flags are not supported"),
        ("FROM debian\nRUN <<EOF\nx\nEOF\n", "a here-document"),
        ("FROM debian\nCOPY --from=x a b\n", "only files of the task's environment folder"),
        ("FROM debian\nCOPY ../a b\n", "only files of the task's environment folder"),
        ("FROM debian\nADD https://x/y z\n", "only files of the task's environment folder"),
        ("FROM debian\nADD x.tar.gz /\n", "only files of the task's environment folder"),
        ("FROM debian\nUSER agent\n", "'USER agent', which is not supported"),
        ('FROM debian\nENTRYPOINT ["x"]\n', "which is not supported"),
    ],
)
def test_what_cannot_be_honoured_names_the_instruction(
    tmp_path: Path, text: str, problem: str
) -> None:
    with pytest.raises(UnsupportedTaskError, match=problem):
        _read(tmp_path, text)


def test_images_and_the_network_may_be_given(tmp_path: Path) -> None:
    assert len(_read(tmp_path, "FROM my/image\nRUN curl x\n", network=True).steps) == 1
    with pytest.raises(UnsupportedTaskError, match="docker_image other"):
        read_image(tmp_path / "none", "other", images=[], network=False)
    assert read_image(tmp_path / "none", "ubuntu:24.04", images=[], network=False).workdir == "/"
    (tmp_path / "docker-compose.yaml").touch()
    with pytest.raises(UnsupportedTaskError, match="compose file"):
        _read(tmp_path, "FROM debian\n")


def test_a_script_that_needs_the_network_is_named_with_its_line() -> None:
    check_script("tests/test.sh", "# curl x\ncurl http://localhost:80\necho 1\n")
    with pytest.raises(UnsupportedTaskError, match="needs the network in line 2"):
        check_script("tests/test.sh", "echo 1\nuvx pytest\n")
