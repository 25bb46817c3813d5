"""Jobs that read files: each row once an epoch, the same bits with and without read-ahead, and bad files are named."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

import shoal
from support.programs.data import FEATURES

pytestmark = pytest.mark.cluster

ROWS = 960


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(4)
    x = rng.normal(size=(ROWS, FEATURES))
    columns = {f"x{place}": x[:, place] for place in range(FEATURES)}
    rows = pa.table({**columns, "y": x @ np.arange(1.0, FEATURES + 1), "number": np.arange(ROWS)})
    for number in range(3):
        part = rows.slice(number * ROWS // 3, ROWS // 3)
        pq.write_table(part, tmp_path / f"{number}.parquet", row_group_size=50)
        pyarrow.csv.write_csv(part, tmp_path / f"{number}.csv")
    return tmp_path


def train(client: shoal.Client, folder: Path, **settings: Any) -> dict[str, np.ndarray]:
    job = client.submit(
        shoal.Job(
            "support.programs.data:Line",
            workers=2,
            optimizer=shoal.optim.SGD(0.05),
            settings={"folder": str(folder), **settings},
            epochs=3,
            batch_size=16,
            seed=5,
        )
    )
    job.wait(timeout_s=60)
    return job.pull()


@pytest.mark.parametrize("settings", [{}, {"window": 3}, {"format": "csv"}], ids=str)
def test_every_row_is_seen_once_an_epoch_and_reading_ahead_changes_no_bit(
    client: shoal.Client, folder: Path, settings: dict[str, Any]
) -> None:
    ahead, in_turn = (train(client, folder, prefetch=prefetch, **settings) for prefetch in (3, 0))
    for found in (ahead, in_turn):
        assert (found["seen"] == 3).all()
        np.testing.assert_allclose(found["w"], np.arange(1.0, FEATURES + 1), atol=0.1)
    assert ahead["w"].tobytes() == in_turn["w"].tobytes()


def test_job_names_the_damaged_file(client: shoal.Client, folder: Path) -> None:
    path = folder / "1.parquet"
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(shoal.JobFailed, match=r"InvalidData: .*1\.parquet cannot be read: .*damaged or truncated"):
        train(client, folder)
