"""Loading: layers of assignments -> one validated tree, and where each leaf came from.

Each layer is a list of `Assignment(key, value, source)`: a YAML file gives one per leaf, an
argument gives one. Later layers override earlier ones. Lists are replaced, never merged; tables
gain entries; setting the `kind` of a section drops what earlier layers set of keys that not every
kind has. `preset=NAME` in a layer puts a file of `presets/` right below it. verl's keys are
translated first (`verl_keys`). All errors are reported in one `ConfigError` that quotes key, value
and source.

Paths in a file are relative to that file, paths in arguments to the working directory.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from treadle.tools.environments import LIBRARIES
from treadle.tools.interpolation import InterpolationError, resolve
from treadle.tools.scalars import ScalarError, parse_value
from treadle.trainer.config.hydra import OF_HYDRA, composed
from treadle.trainer.config.keys import Leaf, all_leaves, all_sections, leaf_of, nearest
from treadle.trainer.config.schema import Config
from treadle.trainer.config.sft import VERL_NAMES, VERL_NOTED, AnyConfig, SftConfig
from treadle.trainer.config.topology import derived_settings
from treadle.trainer.config.verl.defaults import verl_defaults, verl_keys
from treadle.trainer.config.verl.reasons import reason
from treadle.trainer.config.verl_keys import (
    Assignment,
    ConfigError,
    follows_another,
    known_keys,
    translate,
)
from treadle.trainer.config.verl_table import RENAMED
from treadle.trainer.demo import is_demo_model
from treadle.trainer.hub import is_data_uri, is_model_id
from treadle.trainer.problems import Problems, SeveralProblems

__all__ = [
    "Assignment",
    "ConfigError",
    "LoadedConfig",
    "LoadedSftConfig",
    "MissingSettings",
    "is_sft",
    "load_config",
    "load_run_config",
    "load_sft_config",
]

_CODE_KEYS = (
    *("algorithm.advantage", "algorithm.loss"),
    *("reward.name", "agent.loops", "data.reader"),
)
"""Keys whose values may name the user's own code."""
_PRESET = "preset"
_PRESETS = Path(__file__).parent / "presets"
_MODEL_KEYS = ("model.path", "actor_rollout_ref.model.path")


class MissingSettings(ConfigError):
    """Required settings are missing, and nothing else is wrong with the configuration.

    Attributes:
        errors: One error for each missing setting.
    """

    def __init__(self, keys: tuple[str, ...], text: str, errors: tuple[Exception, ...]) -> None:
        self.keys = keys
        self.errors = errors
        super().__init__(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """A run's configuration and its provenance."""

    config: Config
    sources: Mapping[str, str]
    """Key of a leaf or of a table's entry -> `default`, a file, or the argument as written."""
    notes: tuple[str, ...]
    """How verl's keys were interpreted, where that is more than a renaming."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedSftConfig:
    """The configuration of supervised fine-tuning and its provenance; see `LoadedConfig`."""

    config: SftConfig
    sources: Mapping[str, str]
    notes: tuple[str, ...]


def load_sft_config(files: Sequence[Path], overrides: Sequence[str]) -> LoadedSftConfig:
    """Merges the layers of `treadle sft` and validates the result.

    Args:
        files: YAML files; later ones override earlier ones.
        overrides: `key=value` arguments; later ones override earlier ones.

    Raises:
        ConfigError: A file cannot be read, a key is unknown, or a value is invalid.
    """
    problems = Problems(ConfigError)
    layers: list[list[Assignment]] = [[]]
    for path in files:
        with problems.collected():
            layers.append(list(_read_file(path, SftConfig)))
    layers.append([])
    for text in overrides:
        with problems.collected():
            layers[-1].append(_parse_argument(text))
    layers = _resolved(layers, problems, SftConfig)
    notes = tuple(
        f"{each.key}={each.value} has no effect: {VERL_NOTED[each.key]}"
        for layer in layers
        for each in layer
        if each.key in VERL_NOTED
    )
    renamed = [
        [
            replace(each, key=VERL_NAMES.get(each.key, each.key))
            for each in layer
            if each.key not in VERL_NOTED
        ]
        for layer in layers
    ]
    merged = _merge(renamed, problems, SftConfig)
    config = _validated(merged, problems, SftConfig)
    assert isinstance(config, SftConfig)
    return LoadedSftConfig(config=config, sources=_sources(merged, SftConfig), notes=notes)


def load_run_config(file: Path) -> AnyConfig:
    """Returns the configuration in a run directory, of either kind of run.

    Raises:
        ConfigError: The file cannot be read, a key is unknown, or a value is invalid.
    """
    if is_sft(file):
        return load_sft_config([file], []).config
    return load_config([file], []).config


def is_sft(file: Path) -> bool:
    """Returns whether the configuration of a run directory is one of fine-tuning.

    Raises:
        ConfigError: The file cannot be read.
    """
    kinds = (each.value for each in _read_file(file, SftConfig) if each.key == "schedule.kind")
    return next(kinds, None) == "sft"


def load_config(
    files: Sequence[Path],
    overrides: Sequence[str],
    *,
    default_file: Path | None = None,
    below: Sequence[str] = (),
) -> LoadedConfig:
    """Merges the layers and validates the result.

    Args:
        files: YAML files; later ones override earlier ones.
        overrides: `key=value` arguments; later ones override earlier ones.
        default_file: Used as the first layer if there are no `files` and no argument names a model.
        below: `key=value` arguments that files and `overrides` override.

    Raises:
        ConfigError: A file cannot be read, a key is unknown, or a value is invalid.
        MissingSettings: A required key is missing, and nothing else is wrong.
    """
    problems = Problems(ConfigError)
    arguments = []
    for text in overrides:
        with problems.collected():
            arguments.append(_parse_argument(text))
    names_model = any(argument.key in _MODEL_KEYS for argument in arguments)
    if not files and default_file is not None and not names_model:
        files = (default_file,)
    layers: list[list[Assignment]] = []
    notes: list[str] = []
    given = [[_parse_argument(text) for text in below]]
    for path in files:
        with problems.collected():
            given.append(list(_read_file(path, Config)))
    given.append(arguments)
    given = _resolved(list(_with_presets(given, problems)), problems, Config)
    values = {each.key: each.value for layer in given for each in layer}
    for number, layer in enumerate(given):
        later = {assignment.key for after in given[number + 1 :] for assignment in after}
        # What a later layer replaces is not checked: verl's keys may be wrong by themselves.
        kept = [each for each in layer if each.key not in later or each.key in all_leaves()]
        translated, layer_notes = translate(kept, values, problems)
        layers.append(translated)
        notes += layer_notes
    merged = _merge(layers, problems, Config)
    config = _validated(merged, problems, Config)
    assert isinstance(config, Config)
    return LoadedConfig(config=config, sources=_sources(merged, Config), notes=tuple(notes))


def _resolved(
    layers: Sequence[Sequence[Assignment]], problems: Problems, root: type[BaseModel]
) -> list[list[Assignment]]:
    """Returns the layers with the values that references (`${...}`) of any layer lead to."""
    last = {each.key: each for layer in layers for each in layer}
    renamed = VERL_NAMES if root is SftConfig else RENAMED

    def look_up(key: str) -> Any:
        ours = renamed.get(key, key)
        for name in (key, ours, *(theirs for theirs in renamed if renamed[theirs] == ours)):
            if name in last:
                return last[name].value
        if root is Config and key in verl_defaults():
            return verl_defaults()[key][0]
        return all_leaves(root)[key].default

    def resolved(each: Assignment) -> Assignment:
        if root is Config and follows_another(each):
            return each
        try:
            value = resolve(each.value, each.key, look_up)
        except InterpolationError as error:
            raise ConfigError(f"{each.key}={each.value}: {error}") from None
        return each if value is each.value else replace(each, value=value, text=str(value))

    result: list[list[Assignment]] = []
    for layer in layers:
        result.append([])
        for each in layer:
            # What is replaced may refer to nothing.
            if last[each.key] is each or "${" not in str(each.value):
                with problems.collected():
                    result[-1].append(resolved(each))
    return result


def _with_presets(
    layers: Sequence[list[Assignment]], problems: Problems
) -> Iterator[list[Assignment]]:
    """Yields the layers; where one names a preset, the preset's own layer comes right below it."""
    for layer in layers:
        named = [assignment for assignment in layer if assignment.key == _PRESET]
        for assignment in named[-1:]:
            known = sorted(path.stem for path in _PRESETS.glob("*.yaml"))
            if assignment.value not in known:
                problems.add(
                    ConfigError(
                        f"{_PRESET}={assignment.value}: there is no such preset; there are: "
                        f"{', '.join(known)}"
                    )
                )
                continue
            yield [
                replace(each, source=f"{_PRESET}={assignment.value}")
                for each in _read_file(_PRESETS / f"{assignment.value}.yaml", Config)
            ]
        yield [assignment for assignment in layer if assignment.key != _PRESET]


def _sources(merged: Mapping[str, Assignment], root: type[BaseModel]) -> Mapping[str, str]:
    sources = dict.fromkeys(all_leaves(root), "default")
    return sources | {key: assignment.source for key, assignment in merged.items()}


def _validated(
    merged: Mapping[str, Assignment], problems: Problems, root: type[BaseModel]
) -> BaseModel:
    """Returns the tree.

    Raises:
        ConfigError: There are problems, of before or of a value.
    """
    config = None
    missing: list[str] = []
    try:
        config = root.model_validate(_nest(merged, root))
    except ValidationError as error:
        if not problems and all(detail["type"] == "missing" for detail in error.errors()):
            missing = [k for k, leaf in all_leaves(root).items() if leaf.required]
            missing = [key for key in missing if key not in merged]
        for line in _explain(error, merged, root, only_values=bool(problems)):
            problems.add(ConfigError(line))
    try:
        problems.raise_if_any()
    except (ConfigError, SeveralProblems) as error:
        if missing:
            each = error.errors if isinstance(error, SeveralProblems) else (error,)
            raise MissingSettings(tuple(missing), str(error), each) from None
        if isinstance(error, SeveralProblems):
            raise ConfigError(str(error)) from None
        raise
    assert config is not None, "what is not valid has left a problem"
    return config


def _parse_argument(text: str) -> Assignment:
    key, equals, raw = text.partition("=")
    key = key.removeprefix("+").removeprefix("+").strip()
    if not equals or not key:
        raise ConfigError(f"{text!r} is not key=value; `treadle --help SECTION` lists the keys")
    try:
        value = parse_value(raw)
    except ScalarError as error:
        raise ConfigError(f"{key}: {error}") from None
    return Assignment(key=key, value=value, source=text, text=raw.strip(), base=Path.cwd())


class _UniqueKeyLoader(yaml.SafeLoader):
    """A SafeLoader that rejects a mapping with a duplicate key, instead of keeping the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, str | int | float | bool | None):
                raise ConfigError(f"line {line}: the key {key!r:.80} is not a name")
            if key in seen:
                raise ConfigError(f"line {line}: the key {key!r} appears twice; keep one")
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def _read_file(
    path: Path, root: type[BaseModel], *, below: Sequence[Path] = ()
) -> Iterator[Assignment]:
    """Yields the assignments of a file, which those of `below` list in their `defaults`."""
    if path in below:
        raise ConfigError(f"{path}: its defaults lead back to itself")
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except ConfigError as error:
        raise ConfigError(f"--config {path}, {error}") from None
    except RecursionError:
        raise ConfigError(f"--config {path} is nested too deeply") from None
    # Bytes that are no text, and scalars that look like a date or a number and are none.
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"--config {path} is not YAML: {error}") from None
    if content is None:
        return
    if not isinstance(content, Mapping):
        raise ConfigError(f"--config {path}: expected a mapping of sections, got {content!r:.200}")
    if root is not Config or not content.keys() & OF_HYDRA:
        yield from _flatten(content, "", path, root)
        return
    for part in composed(content, path):
        if isinstance(part, Mapping):
            yield from _flatten(part, "", path, root)
        else:
            yield from _read_file(part, root, below=(*below, path))


def _flatten(
    node: Mapping[Any, Any], prefix: str, path: Path, root: type[BaseModel]
) -> Iterator[Assignment]:
    for name, value in node.items():
        key = f"{prefix}{name}"
        leaf = leaf_of(key, root)
        if isinstance(value, Mapping) and (leaf is None or leaf.key == key):
            yield from _flatten(value, f"{key}.", path, root)
        else:
            yield Assignment(
                key=key, value=value, source=str(path), text=None, base=path.resolve().parent
            )


def _merge(
    layers: Sequence[Sequence[Assignment]], problems: Problems, root: type[BaseModel]
) -> dict[str, Assignment]:
    merged: dict[str, Assignment] = {}
    for layer in layers:
        below = frozenset(merged)
        for assignment in layer:
            with problems.collected():
                _assign(merged, assignment, below, root)
    with problems.collected():
        merged |= _derived(merged, root)
    return merged


def _derived(merged: Mapping[str, Assignment], root: type[BaseModel]) -> dict[str, Assignment]:
    """Returns what follows from the run's GPUs and is not set."""
    leaves = all_leaves(root)
    try:
        derived = derived_settings(
            {key: assignment.value for key, assignment in merged.items()},
            {key: leaf.default for key, leaf in leaves.items()},
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if not derived:
        return {}
    given = merged["launch.gpus_per_node"]
    source = f"follows from {given.source if '=' in given.source else f'{given.key}={given.value}'}"
    return {
        key: Assignment(key=key, value=value, source=source, text=None, base=given.base)
        for key, value in derived.items()
    }


def _assign(
    merged: dict[str, Assignment],
    assignment: Assignment,
    below: Set[str],
    root: type[BaseModel],
) -> None:
    """Adds one assignment; `below` are the keys that earlier layers set."""
    section = all_sections(root).get(assignment.key)
    if section is not None and section.kinds:
        assignment = replace(assignment, key=f"{assignment.key}.kind")
    elif section is not None:
        raise ConfigError(
            f"{assignment.key}={assignment.value!r} ({assignment.source}): {assignment.key} "
            f"is a section; set one of its keys"
        )
    leaf = leaf_of(assignment.key, root)
    if leaf is None:
        raise ConfigError(_unknown(assignment, root))
    if leaf.is_table and leaf.key == assignment.key:
        raise ConfigError(
            f"{leaf.key}={assignment.value!r} ({assignment.source}): set its entries, as in "
            f"{leaf.key}.NAME=VALUE"
        )
    prefix, _, name = assignment.key.rpartition(".")
    if name == "kind" and prefix in all_sections(root):
        for key in below:
            known = leaf_of(key, root) if key.startswith(f"{prefix}.") else None
            if known is not None and known.variants:
                merged.pop(key, None)
    merged[assignment.key] = replace(assignment, value=_fit(assignment, leaf, root))


def _unknown(assignment: Assignment, root: type[BaseModel]) -> str:
    if root is SftConfig:
        known, command = nearest(assignment.key, all_leaves(root)), "treadle sft"
    else:
        top = assignment.key.partition(".")[0]
        theirs = [key for key in {*known_keys(), *verl_keys()} if key.partition(".")[0] == top]
        if not theirs and (why := reason(assignment.key)) is not None:
            return f"{assignment.key} is not available: {why}"
        known, command = nearest(assignment.key, {*all_leaves(), *theirs}), "treadle"
    hint = (
        f"; did you mean {' or '.join(known)}?"
        if known
        else f"; `{command} --help SECTION` lists the keys"
    )
    where = (
        ""
        if assignment.source.startswith(("+", assignment.key))
        else (f" (in {assignment.source})")
    )
    return f"unknown key {assignment.key}{where}{hint}"


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # A name that is longer than any file's.
        return False


def _fit(assignment: Assignment, leaf: Leaf, root: type[BaseModel]) -> Any:
    """Returns the value in the form of the leaf's type, where the spelling is ambiguous."""
    value = assignment.value
    if leaf.key in _CODE_KEYS and isinstance(value, str | list):
        if isinstance(value, list):
            return [_code(assignment.base, str(each)) for each in value]
        return _code(assignment.base, value)
    if leaf.is_table:
        return value
    section = all_sections(root).get(leaf.key.removesuffix(".kind"))
    if section is not None and section.kinds and value not in section.kinds:
        raise ConfigError(f"{section.key}={value}: not one of {', '.join(section.kinds)}")
    if isinstance(value, bool) and not leaf.takes(bool):
        raise ConfigError(f"{leaf.key}={value}: not a truth value; {_expected(leaf)}")
    is_string = leaf.takes(str, Path) and not leaf.takes(int, float, bool)
    if is_string and isinstance(value, int | float) and assignment.text:
        value = assignment.text  # `run.name=007` stays as written
    item_types = [get_args(t)[0] for t in leaf.alternatives if get_origin(t) is tuple]
    if item_types and isinstance(value, str):
        value = [value]  # a single file needs no brackets
    if leaf.takes(Path) and isinstance(value, str):
        if any(value in get_args(member) for member in leaf.alternatives):
            return value  # a word, not a path
        if (
            leaf.key in ("model.path", "algorithm.reference_path")
            and (is_model_id(value) or is_demo_model(value))
            and not _exists(assignment.base / value)
        ):
            return value
        return _path(assignment.base, value)
    if leaf.key == "run.loggers" and isinstance(value, list):
        return [_code(assignment.base, str(item)) for item in value]
    if Path in item_types and isinstance(value, list):
        return [
            item if is_data_uri(str(item)) else _data_path(assignment.base, str(item))
            for item in value
        ]
    return value


def _code(base: Path, reference: str) -> str:
    """Returns a reference to the user's code, `path.py:name` with an absolute path."""
    file, _, name = reference.rpartition(":")
    return f"{_path(base, file)}:{name}" if file.endswith(".py") else reference


def _data_path(base: Path, text: str) -> Path | str:
    """Returns a data file's absolute path; an environment's "LIBRARY:NAME" stays, but for code."""
    library, colon, name = text.partition(":")
    if colon and library in LIBRARIES:
        return f"{library}:{_code(base, name)}"
    return _path(base, text)


def _path(base: Path, text: str) -> Path:
    """Returns the path absolute and without `..`; symbolic links stay, as hosts may differ."""
    path = base / Path(text).expanduser()
    return path.resolve() if ".." in path.parts else path


def _expected(leaf: Leaf) -> str:
    return leaf.doc or "see --help"


def _nest(merged: Mapping[str, Assignment], root: type[BaseModel]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, assignment in merged.items():
        leaf = leaf_of(key, root)
        above = leaf.key if leaf is not None and leaf.key != key else key.rpartition(".")[0]
        node = tree
        for parent in above.split(".") if above else ():
            node = node.setdefault(parent, {})
        node[key[len(above) + 1 :] if above else key] = assignment.value
    for key, section in all_sections(root).items():
        if section.kinds:  # the default kind is explicit, so that its fields alone select it
            *parents, name = key.split(".")
            node = tree
            for parent in parents:
                node = node.get(parent, {})
            if name in node:
                node[name].setdefault("kind", all_leaves(root)[f"{key}.kind"].default)
    return tree


def _explain(
    error: ValidationError,
    merged: Mapping[str, Assignment],
    root: type[BaseModel],
    *,
    only_values: bool,
) -> Iterator[str]:
    """Yields what is wrong, without what a refused key may have caused if `only_values`."""
    for detail in error.errors(include_url=False):
        if only_values and detail["type"] in ("missing", "value_error"):
            continue
        path = [str(part) for part in detail["loc"]]
        key = _existing_key(path, root)
        message = _plain(detail)
        leaf = leaf_of(key, root)
        if detail["type"] == "missing" and leaf is None:
            leaves = all_leaves(root)
            required = [k for k, v in leaves.items() if v.required and k.startswith(key)]
            yield from (f"{k} is required: {leaves[k].doc}" for k in required)
        elif detail["type"] == "missing":
            yield f"{key} is required: {leaf.doc if leaf else 'set it'}"
        elif key in merged:
            assignment = merged[key]
            if detail["type"] == "extra_forbidden" and leaf is not None:
                message = f"belongs to kind {' or '.join(leaf.variants)} only"
            elif message.startswith("must be") and leaf and type(None) in leaf.alternatives:
                message += ", or null"
            where = "" if "=" in assignment.source else f" (in {assignment.source})"
            yield f"{key}={assignment.value}{where}: {message}"
        else:
            yield f"{key}: {message}" if key else message


def _plain(detail: ErrorDetails) -> str:
    """Returns what is wrong with a value in the words of a configuration, not of a library."""
    kind, context = detail["type"], detail.get("ctx", {})
    for ending, symbol in (
        ("greater_than", ">"),
        ("greater_than_equal", ">="),
        ("less_than", "<"),
        ("less_than_equal", "<="),
    ):
        if kind == ending:
            return f"must be {symbol} {next(iter(context.values())):g}"
    if kind == "too_short":
        return f"needs at least {context['min_length']}"
    if kind == "literal_error":
        return f"must be {context['expected']}"
    for stem, expected in (
        ("int_", "an integer"),
        ("float_", "a number"),
        ("bool_", "true or false"),
        ("string_", "text"),
        ("path_", "a path"),
        ("tuple_", "a list"),
        ("dict_", "a table"),
    ):
        if kind.startswith(stem):
            return f"must be {expected}"
    return detail["msg"].removeprefix("Value error, ").replace("Input should be", "must be")


def _existing_key(path: Sequence[str], root: type[BaseModel]) -> str:
    """Returns the key of an error's location, without variant tags and list indices."""
    key = ""
    for part in path:
        longer = f"{key}.{part}" if key else part
        if leaf_of(longer, root) is not None or longer in all_sections(root):
            key = longer
    if not key:
        key = ".".join(path)
    return (
        key
        if key in all_leaves(root) or len(path) < 2
        else ".".join([key, *path[key.count(".") + 1 :]])
    )
