"""What becomes of requests that cannot be served as they ask: the `gateway.degradation` section."""

from __future__ import annotations

from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator

from cluster.config.section import Count, Seconds, Section
from router.spec import DegradationSpec, FallbackSpec


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return url.startswith(("http://", "https://")) and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets that do not match, a port that is no number or too high
        return False


class FallbackConfig(Section):
    """Another deployment with an OpenAI-compatible API."""

    url: Annotated[str, Field(max_length=2048)]
    """Up to and with `/v1`, as OpenAI's clients have it."""
    model: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """The model's name there; unset: the same model."""
    api_key: SecretStr | None = None
    timeout_s: Seconds = 30.0
    """Until the first byte of its answer; never beyond the request's deadline."""
    max_requests: Count = 64
    """On their way there at a time."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        # Line ends first: `urlsplit` drops them.
        if not url.isprintable() or any(char in url for char in " ?#@") or not _is_address(url):
            raise ValueError(
                "must be http:// or https://, a host, a port of 1..65535 if any, and a path, in printable characters, "
                "such as http://host:8000/v1"
            )
        return url

    @field_validator("model")
    @classmethod
    def _check_model(cls, model: str | None) -> str | None:
        # It is told in a header.
        if model is not None and not (model.isascii() and model.isprintable()):
            raise ValueError("must be printable ASCII")
        return model

    @field_validator("api_key")
    @classmethod
    def _check_key(cls, key: SecretStr | None) -> SecretStr | None:
        plain = key.get_secret_value() if key else ""
        if not (plain.isascii() and plain.isprintable() and plain == plain.strip()):
            raise ValueError("must be printable ASCII, without spaces around it")
        return key


class DegradationConfig(Section):
    lost_deadline: Literal["reject", "best_effort", "fallback"] = "reject"
    """A request that is predicted to miss its deadline; needs limits.refuse_lost_deadlines, which has that judged."""
    overload: Literal["reject", "fallback"] = "reject"
    """A request that is over a limit of the deployment, or that no worker can take."""
    best_effort_classes: Annotated[int, Field(ge=0, le=1_000_000)] = 1
    """Added to the `priority` of a request that is let in although its deadline is doubtful or lost."""
    fallback: FallbackConfig | None = None

    @model_validator(mode="after")
    def _check_fallback(self) -> Self:
        wanted = [name for name in ("lost_deadline", "overload") if getattr(self, name) == "fallback"]
        if wanted and self.fallback is None:
            raise ValueError(f"{wanted[0]}: fallback needs a fallback to be configured")
        if self.fallback is not None and not wanted:
            raise ValueError("fallback: nothing is sent there; set lost_deadline or overload to fallback")
        return self

    def spec(self) -> DegradationSpec:
        values = self.model_dump(exclude={"fallback"})
        if self.fallback is None:
            return DegradationSpec(**values)
        there = self.fallback
        key = there.api_key.get_secret_value() if there.api_key else ""
        shown = there.model_dump(exclude={"api_key", "url"})
        return DegradationSpec(**values, fallback=FallbackSpec(**shown, url=there.url.rstrip("/"), api_key=key))
