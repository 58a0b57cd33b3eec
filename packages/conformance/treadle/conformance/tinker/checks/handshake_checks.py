"""The calls of a client before it trains: configuration, capabilities, sessions, keys."""

import pytest

from treadle.conformance.tinker.client import Failed, RemoteService


def test_health_is_answered(service: RemoteService) -> None:
    service.call("GET", "/healthz", None)


def test_a_client_is_configured(service: RemoteService) -> None:
    found = service.post("/client/config", sdk_version="0.38.0")
    assert isinstance(found, dict), found


def test_telemetry_is_accepted(service: RemoteService) -> None:
    service.post("/telemetry", events=[], platform="test", sdk_version="0.38.0", session_id="s")


def test_the_base_model_is_listed_with_its_context(service: RemoteService) -> None:
    model = service.base_model()
    assert model["model_name"] and model["max_context_length"] >= 32, model


def test_a_wrong_key_is_refused(service: RemoteService) -> None:
    if not service.key:
        pytest.skip("the server needs no key: set --token-file to check it")
    with pytest.raises(Failed) as raised:
        service.call("GET", "/get_server_capabilities", None, key="tml-of-another-server")
    assert raised.value.status in (401, 403), raised.value


def test_a_session_lives(service: RemoteService) -> None:
    service.post("/session_heartbeat", session_id=service.session())


def test_an_unknown_session_is_refused(service: RemoteService) -> None:
    with pytest.raises(Failed) as raised:
        service.post("/session_heartbeat", session_id="no-such-session")
    assert raised.value.of_the_user, raised.value


def test_sessions_have_names_of_their_own(service: RemoteService) -> None:
    assert service.session() != service.session()
