"""The interaction catalogue: a YAML file in verl's `interaction_config` shape.

Invariant: every key of the file is used, or an error that names the file and the place. An
interaction's own settings are checked by the interaction. Reading happens once, at start.

    interaction:
      - name: gsm8k                           # as rows name it in interaction_kwargs.name
        class_name: treadle.tools.interactions.gsm8k.Gsm8kInteraction
        config: {mode: strict}

`class_name` is a class of this package, verl's name of the same interaction, or the dotted path
of your own class. A class is called as `Class(config=...)` and gives a
`treadle.agent_loop.Interaction`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, cast

from treadle.agent_loop import Interaction, SetupError
from treadle.tools.yaml_config import load_class, mapping, read_yaml, section, string

VERL_CLASSES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "verl.interactions.gsm8k_interaction.Gsm8kInteraction": (
            "treadle.tools.interactions.gsm8k.Gsm8kInteraction"
        )
    }
)
"""verl's class names of interactions that exist here."""


def load_interactions(path: Path) -> Mapping[str, Interaction]:
    """Reads the interactions of a catalogue.

    Returns:
        The name that rows give to the interaction, in the order of the file.

    Raises:
        SetupError: The file cannot be read, has an unknown or missing key or a value of the wrong
            type, names a class that cannot be loaded or refuses its settings, or two interactions
            have one name. The message gives the location in the file.
    """
    document = read_yaml(path, "interaction catalogue")
    entries = section(document, str(path), required=("interaction",))["interaction"]
    if not isinstance(entries, list) or not entries:
        raise SetupError(
            f"{path}: interaction must be a list with at least one interaction, got {entries!r}"
        )
    interactions: dict[str, Interaction] = {}
    for index, entry in enumerate(entries):
        where = f"{path}: interaction[{index}]"
        fields = section(entry, where, required=("name", "class_name"), optional=("config",))
        name = string(fields["name"], f"{where}.name")
        if name in interactions:
            raise SetupError(f"{where}: there already is an interaction {name!r}")
        interactions[name] = _interaction(fields, where)
    return MappingProxyType(interactions)


def _interaction(fields: Mapping[str, object], where: str) -> Interaction:
    class_name = string(fields["class_name"], f"{where}.class_name")
    factory = load_class(class_name, where, verl=VERL_CLASSES, kind="interaction")
    try:
        made = factory(config=mapping(fields.get("config", {}), f"{where}.config"))
    except (SetupError, TypeError, ValueError) as error:
        raise SetupError(f"{where}: {error}") from error
    if not callable(getattr(made, "open", None)):
        raise SetupError(f"{where}: {factory.__qualname__} is not an interaction: it needs `open`")
    return cast(Interaction, made)
