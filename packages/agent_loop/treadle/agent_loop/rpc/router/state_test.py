import pytest

from treadle.agent_loop.rpc.router.state import is_address


@pytest.mark.parametrize(
    "address",
    [
        "10.0.0.1:4000",
        "localhost:1",
        "gpu_7.rack-2.example.org.:65535",
        "[::1]:80",
        "[fe80::1%eth0]:8",
    ],
)
def test_a_host_with_a_port_is_an_address(address: str) -> None:
    assert is_address(address)


@pytest.mark.parametrize(
    "address",
    [
        *(
            "http://a:1",
            "a b:1",
            "a:1\nb:2",
            "a:1\n",
            "\na:1",
            "a:b:1",
            "::1:80",
            "a/b:1",
            "u@a:1",
            "-a:1",
        ),
        *(
            "a",
            "a:",
            ":1",
            "a:0",
            "a:65536",
            "a:-1",
            "a:1 ",
            "a:\u0661",
            "\u0430:1",
            "[a]b:1",
            "",
            7,
        ),
    ],
)
def test_anything_else_is_none(address: object) -> None:
    assert not is_address(address)
