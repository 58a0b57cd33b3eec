"""The secrets that are left out of a configuration that leaves the machine."""

import re
from typing import Any, Final

__all__ = ["REMOVED", "without_secrets"]

REMOVED: Final = "(removed)"
"""In the place of a secret."""

_SECRET = re.compile(
    r"(^|[_-])(api[_-]?key|key|token|pass|passphrase|password|passwd|pwd|secret|credentials?"
    r"|authorization|sig|signature)$",
    re.IGNORECASE,
)
_NO_SECRET = re.compile(
    r"(^|[_-])(bos|eos|pad|unk|sep|cls|mask|stop|end|start|special|image|video|audio|per)[_-]token$"
    r"|^(messages|tools|prompt|images)_key$",
    re.IGNORECASE,
)
"""A tokenizer's special tokens, a number per token, and settings that name columns of rows."""

_ADDRESS = re.compile(r"://\S+")
_USER = re.compile(r"(?<=://)[^/\s]+(?=@)")
_PARAMETER = re.compile(r"(?<=[?&;#])([^=&;#\s]+)=([^&;#\s]+)")


def without_secrets(value: Any, name: str = "") -> Any:
    """Returns plain data without its secrets.

    A secret is whatever stands under a name that tells so (a number and a mapping too), the user
    and password of an address, and a parameter of an address whose name tells so.

    Args:
        value: Mappings, lists, text and numbers.
    """
    if value is not None and value != "" and _is_secret(name):
        return REMOVED
    if isinstance(value, dict):
        return {key: without_secrets(each, str(key)) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(each) for each in value]
    return _ADDRESS.sub(_address, value) if isinstance(value, str) else value


def _is_secret(name: str) -> bool:
    return bool(_SECRET.search(name)) and not _NO_SECRET.search(name)


def _address(match: re.Match[str]) -> str:
    return _PARAMETER.sub(_parameter, _USER.sub(REMOVED, match[0]))


def _parameter(match: re.Match[str]) -> str:
    return f"{match[1]}={REMOVED}" if _is_secret(match[1]) else match[0]
