import stat
from pathlib import Path

import pytest

from treadle.agent_loop.run_certificate import SERVER_NAME
from treadle.policy.weight_sync.server_security import ServerSecurity
from treadle.trainer.config.load import load_config
from treadle.trainer.config.schema import Config
from treadle.trainer.launch.run_tls import RunTls
from treadle.trainer.rollout.server_process import server_spec
from treadle.trainer.rollout.server_security import TOKEN_FILE, server_security, with_own_secrets


def _config(*arguments: str) -> Config:
    return load_config([], ["model.path=/m", "data.train_files=a.jsonl", *arguments]).config


def test_servers_and_clients_of_a_run_share_a_token_that_nobody_else_can_read(
    tmp_path: Path,
) -> None:
    file, tokens = tmp_path / TOKEN_FILE, []
    file.write_text("of a run that was killed")
    file.chmod(0o644)
    for _ in range(2):
        with with_own_secrets(_config(), tmp_path, None) as secured:
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            tokens.append(server_security(secured.rollout).read().token)
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
    with with_own_secrets(config, tmp_path, None) as secured:
        assert secured is config
        assert not list(tmp_path.iterdir())


def test_on_a_cluster_servers_have_the_certificate_of_the_run(tmp_path: Path) -> None:
    tls = RunTls(tmp_path / "tls")
    with with_own_secrets(_config("launch=ray", "launch.address=auto"), tmp_path, tls) as secured:
        arguments = server_spec(secured, "rollout-0", weights_directory=None).args
        options = dict(zip(arguments[::2], arguments[1::2], strict=True))
        assert options["--security.tls_certificate"] == str(tls.certificate)
        assert options["--security.tls_key"] == str(tls.key)
        token = tls.directory / TOKEN_FILE  # with the certificates it comes to every node
        assert options["--security.token_file"] == str(token)
        assert server_security(secured.rollout) == ServerSecurity(
            tls=True, roots=tls.roots, server_name=SERVER_NAME, token=token
        )
    own = _config(
        *("launch=ray", "launch.address=auto", "rollout.token_file=t"),
        *("rollout.tls_certificate=c", "rollout.tls_key=k"),
    )
    with with_own_secrets(own, tmp_path, tls) as secured:
        assert secured is own
