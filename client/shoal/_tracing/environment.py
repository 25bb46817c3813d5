"""Tracing settings in environment variables."""

from collections.abc import Mapping

from shoal import errors

SWITCH = "SHOAL_TRACING"
_EXPORTER = "OTEL_TRACES_EXPORTER"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


def enabling_variable(environment: Mapping[str, str]) -> str:
    """Returns the variable that enables tracing, or an empty string if none does.

    Raises:
        BadRequest: the variables have unsupported values.
    """
    if not may_be_wanted(environment):
        return ""
    exporter = environment.get(_EXPORTER, "").strip().lower()
    if exporter not in ("", "otlp", "none"):
        raise errors.BadRequest(f"{_EXPORTER} is {exporter!r}; set it to otlp or none")
    protocol = next((environment[name] for name in _PROTOCOLS if environment.get(name)), "grpc")
    asking = [name for name in (SWITCH, _EXPORTER, *_ENDPOINTS) if environment.get(name)]
    asking = [name for name in asking if name != SWITCH or environment[name] == "on"]
    if not asking or exporter == "none":
        return ""
    if protocol != "grpc":
        raise errors.BadRequest(
            f"the OTLP protocol is {protocol!r}, but Shoal supports only grpc; set {_PROTOCOLS[1]}=grpc and the "
            f"collector's port for it, usually 4317, or set {SWITCH}=off"
        )
    return asking[0]


def may_be_wanted(environment: Mapping[str, str]) -> bool:
    """Returns whether the environment does not disable tracing. A program may then enable it by its own provider.

    Raises:
        BadRequest: SHOAL_TRACING has an unknown value.
    """
    switch = environment.get(SWITCH) or "auto"
    if switch not in ("auto", "on", "off"):
        raise errors.BadRequest(f"{SWITCH} is {switch!r}; set it to on, off or auto")
    return switch != "off" and environment.get("OTEL_SDK_DISABLED", "").strip().lower() != "true"


def suspects(environment: Mapping[str, str], error: Exception) -> list[str]:
    """Returns the variables that may have caused an error of OpenTelemetry: those it quotes, else all OTEL_ ones."""
    ours = sorted(name for name in environment if name.startswith("OTEL_"))
    text = str(error)
    quoted = [name for name in ours if name in text or repr(environment[name]) in text]
    return quoted or ours


__all__ = ["SWITCH", "enabling_variable", "may_be_wanted", "suspects"]
