import stat
from pathlib import Path

import pytest

from treadle.trainer.config.load import load_config
from treadle.trainer.config.schema import Config
from treadle.trainer.rollout.server_process import server_spec
from treadle.trainer.rollout.server_security import TOKEN_FILE, ServerSecurity, with_own_token


def _config(*arguments: str) -> Config:
    return load_config([], ["model.path=/m", "data.train_files=a.jsonl", *arguments]).config


def test_servers_and_clients_of_a_run_share_a_token_that_nobody_else_can_read(
    tmp_path: Path,
) -> None:
    file, tokens = tmp_path / TOKEN_FILE, []
    file.write_text("of a run that was killed")
    file.chmod(0o644)
    for _ in range(2):
        with with_own_token(_config(), tmp_path) as secured:
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            tokens.append(ServerSecurity.of(secured.rollout).read().token)
            arguments = server_spec(secured, "rollout-0", weights_directory=None).args
            assert arguments[arguments.index("--security.token_file") + 1] == str(file)
        assert not file.exists()
    assert len(set(tokens)) == 2
    assert all(token is not None and len(token) >= 32 for token in tokens)


@pytest.mark.parametrize(
    "arguments",
    [
        ("rollout.token_file=mine",),
        ("rollout.tls_certificate=c", "rollout.tls_key=k"),
        ("launch=ray", "launch.allow_plaintext_on_network=true"),
    ],
)
def test_what_the_user_decided_stays(arguments: tuple[str, ...], tmp_path: Path) -> None:
    config = _config(*arguments)
    with with_own_token(config, tmp_path) as secured:
        assert secured is config
        assert not list(tmp_path.iterdir())
