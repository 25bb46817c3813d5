"""Secrets of members: they name a registration, and only the holder of the key can make them."""

import pytest

from shoal import errors
from shoal._security import MemberIdentity, MemberSecrets, shown, shown_in


def test_a_secret_names_its_registration_also_after_a_restart() -> None:
    secret = MemberSecrets(b"key").of("gpu-1", 7)
    assert MemberSecrets(b"key").identify(secret) == MemberIdentity("gpu-1", 7)
    assert shown_in([("authorization", "Bearer x"), *shown(secret)]) == secret
    assert shown("") == ()
    assert shown_in(None) == ""


def test_a_secret_cannot_be_made_without_the_key_nor_be_changed() -> None:
    secrets = MemberSecrets(b"key")
    genuine = secrets.of("gpu-1", 7)
    mac = genuine.rpartition(".")[2]
    for forged in (
        MemberSecrets(b"other").of("gpu-1", 7),
        f"gpu-2.7.{mac}",
        f"gpu-1.8.{mac}",
        mac,
        f".{mac}",
        "",
        "é",
        "x" * 9_000,
    ):
        with pytest.raises(errors.SecretRefused, match="register again"):
            secrets.identify(forged)
