"""The certificate of trainers: which files they present, and what stops the start of a worker."""

import os
from pathlib import Path

import pytest

from shoal import errors
from shoal._security import NO_CREDENTIALS
from shoal._security.certificate_identity import principal_in
from shoal._security.certificates import make_certificates
from shoal_worker.isolation import TrainerUser, trainer_tls
from support.certificates import credentials

NOBODY = TrainerUser("nobody", 65_534, 65_534, "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder)
    return folder


def own(folder: Path) -> tuple[str, str]:
    return f"{folder}/trainer.pem", f"{folder}/trainer-key.pem"


def test_trainers_present_their_own_certificate_if_they_have_one(folder: Path) -> None:
    worker = credentials(folder, "worker")
    assert trainer_tls(worker, "", "", None) == ()
    assert trainer_tls(worker, *own(folder), None) == (f"{folder}/ca.pem", *own(folder))
    assert trainer_tls(NO_CREDENTIALS, "", "", NOBODY) == ()


def test_their_certificate_gives_no_rights(folder: Path) -> None:
    with pytest.raises(errors.Unauthenticated, match="it names: trainer"):
        principal_in((folder / "trainer.pem").read_bytes())


def test_trainers_of_another_user_need_their_own_certificate(folder: Path) -> None:
    worker = credentials(folder, "worker")
    with pytest.raises(errors.BadRequest, match=r"must not read .*worker-key.pem, .*Give .* --trainer-tls-cert"):
        trainer_tls(worker, "", "", NOBODY)
    same = TrainerUser("me", os.geteuid(), os.getegid(), "")
    assert trainer_tls(worker, "", "", same) == ()


def test_files_that_do_not_fit_stop_the_start(folder: Path) -> None:
    worker, (certificate, key) = credentials(folder, "worker"), own(folder)
    with pytest.raises(errors.BadRequest, match="a key without a certificate; give both"):
        trainer_tls(worker, "", key, None)
    with pytest.raises(errors.BadRequest, match="this worker does not use TLS"):
        trainer_tls(NO_CREDENTIALS, certificate, key, None)
    with pytest.raises(errors.BadRequest, match=r"trainers cannot use .*does not belong to the certificate"):
        trainer_tls(worker, certificate, f"{folder}/worker-key.pem", None)
