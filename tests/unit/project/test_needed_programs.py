"""Programs that tests need: in CI and in `make e2e`, a missing one must not skip its tests silently."""

import pytest

from support.deployment.needed_programs import need


@pytest.mark.parametrize(("variable", "failing"), [("SHOAL_E2E", ("SHOAL_E2E",)), ("CI", ("SHOAL_E2E", "CI"))])
def test_missing_program_fails_where_it_is_required(
    monkeypatch: pytest.MonkeyPatch, variable: str, failing: tuple[str, ...]
) -> None:
    for name in ("SHOAL_E2E", "CI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "1")
    with pytest.raises(pytest.fail.Exception, match="there is no nonesuch nor neither here: Debian has it"):
        need("nonesuch", "neither", source="Debian has it in the package nonesuch", failing=failing)
