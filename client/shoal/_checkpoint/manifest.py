"""What a checkpoint consists of, as a file of its own that is written last: without it, there is no checkpoint.

It is a JSON object whose last field is a checksum of all the bytes before it: any other byte is damage. That, `format`,
`schema` and `writer` stay as they are in all versions, so that each knows a later one's manifest from a damaged one.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import xxhash

from shoal import errors
from shoal._checkpoint.tensors import damaged

# 2: `evaluation` is new; a manifest of 1 has none.
VERSION = 2
FILE = "manifest.json"
BLOCK_BYTES = 4 << 20
MAX_BYTES = 256 << 20
_FORMAT = "shoal-checkpoint"
_END = ',\n "sum": "{}"\n}}\n'
_SIGNED = re.compile(rb'(.*),\n "sum": "([0-9a-f]{16})"\n}\n', re.DOTALL)


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of tensors.

    Attributes:
        name: in the checkpoint's folder.
        nbytes: its size.
        sums: the checksum of each `BLOCK_BYTES` of it, the last one perhaps shorter: so parts can be read alone.
    """

    name: str
    nbytes: int
    sums: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint.

    Attributes:
        job: whose it is.
        number: counts a job's checkpoints, from 1.
        created_at: seconds of Unix time.
        step: the one to go on with.
        version: updates that every shard had applied.
        spec: the job's, as the JSON form of `JobSpec`.
        variables: as the JSON form of `Variable`, in the job's order.
        files: those of the tensors.
        data: the ledger's account; empty: the job had no data of its own.
        progress: the job's figures, for people.
        evaluation: the job's best so far, if the variables were taken at it, as the JSON form of `Evaluation`; else
            empty.
        writer: the version of Shoal.
    """

    job: str
    number: int
    created_at: float
    step: int
    version: int
    spec: Mapping[str, Any]
    variables: tuple[Mapping[str, Any], ...]
    files: tuple[FileEntry, ...]
    data: Mapping[str, Any] = field(default_factory=dict)
    progress: Mapping[str, Any] = field(default_factory=dict)
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    writer: str = ""

    @property
    def nbytes(self) -> int:
        """Of all files of tensors."""
        return sum(entry.nbytes for entry in self.files)

    def to_bytes(self) -> bytes:
        """The file."""
        record = {"format": _FORMAT, "schema": VERSION, **asdict(self)}
        return _signed(record)

    @classmethod
    def from_bytes(cls, text: bytes, where: str) -> "Manifest":
        """What a file says.

        Args:
            text: all of the file.
            where: its name, for messages.

        Raises:
            CorruptCheckpoint: it is damaged.
            IncompatibleCheckpoint: a later Shoal wrote it, or something else.
        """
        signed = _SIGNED.fullmatch(text)
        if signed is None or sum_of(signed[1]) != signed[2].decode():
            raise damaged(where, "its checksum is missing, or another")
        try:
            record = json.loads(text)
            schema = record["schema"]
            ours = record["format"] == _FORMAT and type(schema) is int
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise damaged(where, f"it is no manifest of a checkpoint ({error!r})") from None
        if not ours:
            raise damaged(where, f"it is no manifest of a checkpoint (format {record['format']!r}, schema {schema!r})")
        if schema > VERSION:
            raise errors.IncompatibleCheckpoint(
                f"{where} has schema {schema}; this Shoal reads up to {VERSION}: read it with the Shoal that wrote it, "
                f"{record.get('writer') or 'a later one'}, or a later one",
                file=where,
            )
        try:
            del record["format"], record["schema"], record["sum"]
            files = tuple(FileEntry(it["name"], it["nbytes"], tuple(it["sums"])) for it in record.pop("files"))
            return cls(files=files, variables=tuple(record.pop("variables")), **record)
        except (KeyError, TypeError) as error:
            raise damaged(where, f"a field is missing or unknown: {error}") from None


def sums_of(nbytes: int) -> int:
    """How many checksums a file of so many bytes has."""
    return -(-nbytes // BLOCK_BYTES)


def sum_of(*parts: bytes | memoryview) -> str:
    """The checksum of a block that is there in parts: XXH3, 64 bits. It finds damage, not malice."""
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _signed(record: Mapping[str, Any]) -> bytes:
    text = json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False).removesuffix("\n}").encode()
    return text + _END.format(sum_of(text)).encode()


__all__ = ["BLOCK_BYTES", "FILE", "MAX_BYTES", "FileEntry", "Manifest", "sum_of", "sums_of"]
