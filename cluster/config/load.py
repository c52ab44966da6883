"""From a YAML file or a model name, plus command-line overrides, to a `ServeConfig`.

Every fault becomes one line that names its field.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from cluster.config.schema import ServeConfig
from headrace.errors import StartupError


class ConfigError(StartupError):
    """Bad configuration. `lines` has one fault each: `file: field: what is wrong, with the limit`."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = tuple(lines)


def load_config(
    source: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    pool_overrides: Mapping[str, Any] | None = None,
    replicas: Mapping[str, int] | None = None,
) -> ServeConfig:
    """Reads `source`, a `.yaml`/`.yml` file or a model (None: the defaults), and lays the overrides over it.

    `overrides` maps dotted names (`gateway.http_port`) to values; `pool_overrides`, dotted too, apply to every pool;
    `replicas` maps roles to counts (0 removes the pool). Asking for colocated workers alone drops the prefill and
    decode pools, and the other way round. Raises ConfigError.
    """
    is_file = source is not None and source.endswith((".yaml", ".yml"))
    data: dict[str, Any] = _read_yaml(Path(source)) if is_file and source is not None else {}
    origin = source if is_file and source is not None else "options"
    if source is not None and not is_file:
        _put(data, "model.path", source)
    for name, value in (overrides or {}).items():
        _put(data, name, value)
    if replicas:
        data["pools"] = _with_replicas(data.get("pools"), replicas)
    if pool_overrides:
        pools = data.get("pools", [{"role": "prefill"}, {"role": "decode"}])
        data["pools"] = [_override_pool(pool, pool_overrides) for pool in pools] if isinstance(pools, list) else pools
    try:
        return ServeConfig.model_validate(data)
    except ValidationError as error:
        lines = dict.fromkeys(f"{origin}: {_describe(detail)}" for detail in error.errors(include_url=False))
        raise ConfigError(tuple(lines)) from None


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML lets the last of two equal keys win in silence; a configuration must not."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"'{key.value}' is given twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeyLoader)  # a SafeLoader
    except FileNotFoundError:
        raise ConfigError([f"{path}: no such file"]) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError([f"{path}: cannot be read: {reason}"]) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        raise ConfigError([f"{path}: {where}{getattr(error, 'problem', None) or 'not valid YAML'}"]) from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError([f"{path}: must be a mapping with the keys {', '.join(ServeConfig.model_fields)}"])
    return data


def _put(data: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, leaf = dotted.split(".")
    for parent in parents:
        section = data.get(parent)
        data[parent] = dict(section) if isinstance(section, dict) else {}
        data = data[parent]
    data[leaf] = value


def _override_pool(pool: Any, overrides: Mapping[str, Any]) -> Any:
    if not isinstance(pool, dict):
        return pool
    merged = dict(pool)
    for name, value in overrides.items():
        _put(merged, name, value)
    # The command line names the pool's size in one way; the file's other way gives in.
    if "kv_cache_bytes" in overrides and "kv_cache_fraction" not in overrides:
        merged.pop("kv_cache_fraction", None)
    if "kv_cache_fraction" in overrides and "kv_cache_bytes" not in overrides:
        merged.pop("kv_cache_bytes", None)
    return merged


def _with_replicas(pools: Any, replicas: Mapping[str, int]) -> list[Any]:
    current = pools if isinstance(pools, list) else [{"role": "prefill"}, {"role": "decode"}]
    asked = {role for role, count in replicas.items() if count > 0}
    dropped = {role for role, count in replicas.items() if count == 0}
    if asked == {"colocated"}:
        dropped |= {"prefill", "decode"}
    elif asked and "colocated" not in asked:
        dropped |= {"colocated"}
    kept: list[Any] = []
    seen: set[str] = set()
    for pool in current:
        role = pool.get("role") if isinstance(pool, dict) else None
        if role in dropped or (role in replicas and role in seen):
            continue
        kept.append({**pool, "replicas": replicas[str(role)]} if role in replicas else pool)
        seen.add(str(role))
    kept += [{"role": role, "replicas": count} for role, count in replicas.items() if count != 0 and role not in seen]
    return kept


def _describe(detail: ErrorDetails) -> str:
    """`pools.0.replicas: must be at least 1`."""
    path = ".".join(str(part) for part in detail["loc"] if part != "[key]")
    message = _message(detail)
    return f"{path}: {message}" if path else message


def _message(detail: ErrorDetails) -> str:
    ctx = detail.get("ctx", {})
    match detail["type"]:
        case "extra_forbidden":
            return _unknown(detail["loc"])
        case "missing":
            return "is required"
        case "greater_than_equal":
            return f"must be at least {ctx['ge']}"
        case "greater_than":
            return f"must be above {ctx['gt']}"
        case "less_than":
            return f"must be below {ctx['lt']}"
        case "less_than_equal":
            return f"must be at most {ctx['le']}"
        case "literal_error":
            return f"must be one of {ctx['expected']}"
        case "int_type" | "int_from_float":
            return "must be an integer"
        case "float_type" | "finite_number":
            return "must be a finite number"
        case "bool_type":
            return "must be true or false"
        case "string_type":
            return "must be a string"
        case "string_too_short":
            return f"must have at least {ctx['min_length']} character(s)"
        case "string_too_long":
            return f"must have at most {ctx['max_length']} characters"
        case "tuple_type":
            return "must be a list"
        case "string_pattern_mismatch":
            return "must have 1 to 64 letters, digits, `_`, `.` or `-`"
        case "model_type" | "model_attributes_type" | "dict_type":
            return "must be a mapping"
        case "value_error":
            return str(ctx["error"])
        case _:
            return detail["msg"]


def _unknown(loc: tuple[int | str, ...]) -> str:
    fields = _fields_at(loc[:-1])
    close = difflib.get_close_matches(str(loc[-1]), fields, n=1)
    return f"unknown field; did you mean '{close[0]}'?" if close else f"unknown field; known are {', '.join(fields)}"


def _fields_at(loc: tuple[int | str, ...]) -> list[str]:
    """The field names of the section at a path."""
    section: type[BaseModel] = ServeConfig
    is_name = False
    for part in loc:
        if is_name or not isinstance(part, str):
            is_name = False
            continue
        annotation = section.model_fields[part].annotation
        is_name = get_origin(annotation) is dict
        section = _section_of(annotation)
    return list(section.model_fields)


def _section_of(annotation: Any) -> type[BaseModel]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(arg for arg in get_args(annotation) if isinstance(arg, type) and issubclass(arg, BaseModel))
