"""The model's chat template in a sandbox: messages in, prompt text out.

Filters and globals are those that Hugging Face templates expect (`raise_exception`, `strftime_now`, `tojson`, loop
controls, the `generation` block).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from headrace.errors import HeadraceError, StartupError, invalid

_MAX_MESSAGE_CHARS = 500


class _Refused(jinja2.TemplateError):
    """The template's own `raise_exception`: its text is meant for the caller."""


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training; when serving it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _raise_exception(message: object) -> None:
    raise _Refused(str(message))


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class _PlainDict:
    """`dict(...)` and `dict.fromkeys` without the type itself, whose attributes lead out of a sandbox."""

    def __call__(self, *args: Mapping[object, object], **kwargs: object) -> dict[object, object]:
        made: dict[object, object] = dict(*args)
        made.update(kwargs)
        return made

    def fromkeys(self, keys: Iterable[object], value: object = None) -> dict[object, object]:
        return dict.fromkeys(keys, value)


class _PlainNamespace(Namespace):
    """`namespace(...)` that stores no underscore names, through which a template could reach Python's insides."""

    def __init__(*args: object, **kwargs: object) -> None:
        # Positional only, as in jinja's own: `self` may be one of the template's names.
        values = dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: object) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError("a namespace stores no names that begin with an underscore")


class ChatTemplate:
    """One compiled template. `render` is thread-safe."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        environment.globals["dict"] = _PlainDict()
        environment.globals["namespace"] = _PlainNamespace
        del environment.globals["lipsum"]
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise StartupError(f"the chat template does not compile: line {error.lineno}: {error.message}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """Raises INVALID_ARGUMENT on `messages`: in the template's own words when it refused, in general ones when
        it failed.
        """
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except _Refused as refusal:
            raise invalid("messages", str(refusal)[:_MAX_MESSAGE_CHARS]) from refusal
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise _unrenderable() from error
        except RecursionError as error:
            raise _unrenderable() from error


def _unrenderable() -> HeadraceError:
    return invalid("messages", "the model's chat template cannot render these messages")
