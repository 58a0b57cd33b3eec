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
from treadle.tools.sandbox.room import ROOM_ENVIRONMENT


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


def test_variables_and_quotes_are_read_as_docker_reads_them(tmp_path: Path) -> None:
    read = _read(
        tmp_path,
        """\
ARG VERSION=3.12
FROM python:${VERSION}-slim
ENV PATH="/root/.local/bin:$PATH"
ENV PLACE=${ROOT:-/data} RAW='$B' ESCAPED=\\$B NONE=$B INNER="it's $HOME \\" \\n" TWO='a b'
ENV AGAIN=$TWO SET=${TWO:+yes} UNSET=${B:+yes} EMPTY=${NONE:-x} THERE=${NONE-x}
ENV OLD  "a  b" $TWO
WORKDIR "${APP:-/app dir}"
COPY "a $VERSION"   $PLACE/
COPY ["a b", "$PLACE"]
RUN [ -f /x ] || echo "${x##*/}"
""",
    )
    assert read.environment == {
        "VERSION": "3.12",
        "PATH": f"/root/.local/bin:{ROOM_ENVIRONMENT['PATH']}",
        **{"PLACE": "/data", "RAW": "$B", "ESCAPED": "$B", "NONE": "", "TWO": "a b"},
        **{"INNER": "it's /root \" \\n", "AGAIN": "a b", "SET": "yes", "UNSET": ""},
        **{"EMPTY": "x", "THERE": "", "OLD": "a  b a b"},
    }
    copied, listed, ran = read.steps
    assert listed.copied == ("a b", "/data")
    assert (copied.copied, copied.workdir) == (("a 3.12", "/data/"), "/app dir")
    assert ran.command == ("/bin/sh", "-c", '[ -f /x ] || echo "${x##*/}"')


def test_files_that_docker_would_leave_out_are_refused(tmp_path: Path) -> None:
    (tmp_path / ".dockerignore").write_text("secret\n")
    assert _read(tmp_path, "FROM debian\n").steps == ()
    with pytest.raises(UnsupportedTaskError, match=r"a \.dockerignore, which is not supported"):
        _read(tmp_path, "FROM debian\nCOPY . /app\n")


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
        ("FROM debian\nCOPY a'b /b\n", "COPY a'b /b.: it has a quote that does not end"),
        ('FROM debian\nENV A="b\n', "it has a quote that does not end"),
        ("FROM debian\nENV A=${B:?no}\n", r"it has a \$. of an unknown form"),
        ("FROM debian\nENV A=${B:-${C}}\n", r"it has a \$. of an unknown form"),
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
