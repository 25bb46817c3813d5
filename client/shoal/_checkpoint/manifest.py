"""The manifest of a checkpoint, a file that is written last. A checkpoint without a manifest is incomplete.

It is a JSON object whose last field is a checksum of all bytes before it. The checksum and the fields `format`,
`schema` and `writer` are encoded in the same way in all schemas. Each version of Shoal can therefore distinguish a
manifest of a later schema from a damaged one.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import xxhash
from google.protobuf import json_format

from shoal import errors
from shoal._checkpoint.tensors import damaged
from shoal.v1 import job_pb2

# Schema 2 adds `evaluation`. Schema 3 adds `order` to the ledger; a version that does not know it would continue with
# other samples. Schema 4 adds `submitter`; a version that does not know it would remove the checkpoints of others.
VERSION = 4
FILE = "manifest.json"
BLOCK_BYTES = 4 << 20
MAX_BYTES = 256 << 20
_FORMAT = "shoal-checkpoint"
# What a manifest's fields are in JSON. The checksum shows damage, but somebody else may have written the file.
_TYPES: Mapping[str, type[Any]] = {
    "job": str,
    "number": int,
    "created_at": float,
    "step": int,
    "version": int,
    "spec": dict,
    "variables": list,
    "data": dict,
    "progress": dict,
    "evaluation": dict,
    "writer": str,
    "submitter": str,
}
_END = ',\n "sum": "{}"\n}}\n'
_SIGNED = re.compile(rb'(.*),\n "sum": "([0-9a-f]{16})"\n}\n', re.DOTALL)


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of tensors.

    Attributes:
        name: the file's name in the checkpoint's folder.
        nbytes: size in bytes.
        sums: checksum of each block of `BLOCK_BYTES` bytes, so that parts can be read alone. The last may be shorter.
        tensors: the tensors in the file, as `tensors.entry_of` encodes them, so that a reader opens only the files that
            it needs. Empty in manifests of earlier versions, whose readers open every file.
    """

    name: str
    nbytes: int
    sums: tuple[str, ...]
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint.

    Attributes:
        job: name of the job.
        number: number of the checkpoint within the job, from 1.
        created_at: seconds of Unix time.
        step: the step at which training resumes.
        version: updates that every shard had applied.
        spec: `JobSpec` of the job, as JSON.
        variables: `Variable` of each variable as JSON, in the job's order.
        files: the tensor files.
        data: the ledger as JSON. Empty if the job had no data.
        progress: the job's progress totals, as JSON.
        evaluation: the job's best `Evaluation` as JSON, if the checkpoint was taken at it. Else empty.
        writer: version of Shoal that wrote the checkpoint.
        submitter: who submitted the job, by the name of a token or a certificate. Empty if that is not known, as in a
            cluster that asks for no tokens, in an import, and in manifests of earlier versions.
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
    submitter: str = ""

    @property
    def nbytes(self) -> int:
        """Size of all tensor files in bytes."""
        return sum(entry.nbytes for entry in self.files)

    def belongs_to_another(self, submitter: str) -> bool:
        """Returns whether the checkpoint is known to be another submitter's."""
        return self.submitter not in ("", submitter)

    def to_bytes(self) -> bytes:
        """Encodes the manifest as a file."""
        record = {"format": _FORMAT, "schema": VERSION, **asdict(self)}
        return _signed(record)

    @classmethod
    def from_bytes(cls, text: bytes, where: str) -> "Manifest":
        """Decodes a manifest file.

        Args:
            text: the contents of the file.
            where: the file's name, for messages.

        Returns:
            The manifest.

        Raises:
            CorruptCheckpoint: the file is damaged, or is not a manifest.
            IncompatibleCheckpoint: a later version of Shoal wrote the file.
        """
        signed = _SIGNED.fullmatch(text)
        if signed is None or sum_of(signed[1]) != signed[2].decode():
            raise damaged(where, "its checksum is missing or wrong")
        try:
            record = json.loads(text)
            schema = record["schema"]
            ours = record["format"] == _FORMAT and type(schema) is int
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise damaged(where, f"it is not a manifest ({error!r})") from None
        if not ours:
            raise damaged(where, f"it is not a manifest (format {record['format']!r}, schema {schema!r})")
        if schema > VERSION:
            raise errors.IncompatibleCheckpoint(
                f"{where} has schema {schema}, but this version of Shoal reads up to {VERSION}; read it with the "
                f"version that wrote it ({record.get('writer') or 'unknown'}) or a later one",
                file=where,
            )
        try:
            del record["format"], record["schema"], record["sum"]
            files = tuple(_file(it) for it in record.pop("files"))
            _check_types(record)
            return cls(files=files, variables=tuple(record.pop("variables")), **record)
        except (KeyError, TypeError, AttributeError, json_format.ParseError) as error:
            raise damaged(where, f"a field is missing, unknown or of another type: {error}") from None


def sums_of(nbytes: int) -> int:
    """Returns the number of checksums of a file of `nbytes` bytes."""
    return -(-nbytes // BLOCK_BYTES)


def sum_of(*parts: bytes | memoryview) -> str:
    """Returns the XXH3 checksum (64 bits) of a block, given in parts. It detects damage, not manipulation."""
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _file(record: Mapping[str, Any]) -> FileEntry:
    name, nbytes, sums, tensors = record["name"], record["nbytes"], record["sums"], record.get("tensors", [])
    lists = isinstance(sums, list) and isinstance(tensors, list)
    if not lists or not all(isinstance(text, str) for text in (name, *sums, *tensors)):
        raise TypeError("a file's name, sums and tensors are texts")
    if type(nbytes) is not int or nbytes < 0:
        raise TypeError(f"the file {name!r} has {nbytes!r} bytes")
    return FileEntry(name, nbytes, tuple(sums), tuple(tensors))


def _check_types(record: Mapping[str, Any]) -> None:
    """Checks that the fields are of their types, and that numbers are finite and not negative.

    Raises:
        TypeError, AttributeError, ParseError: a field is of another type, or cannot be parsed.
    """
    for name, value in record.items():
        kind = _TYPES.get(name, object)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if kind in (int, float):
            right = number and (kind is float or isinstance(value, int)) and math.isfinite(value) and value >= 0
        else:
            right = isinstance(value, kind)
        if not right:
            raise TypeError(f"{name} is {value!r:.80}")
    for variable in record["variables"]:
        shape = variable.get("shape", [])
        if not isinstance(shape, list) or not all(str(size).isascii() and str(size).isdecimal() for size in shape):
            raise TypeError(f"a variable has the shape {shape!r:.80}")
    json_format.ParseDict(record.get("evaluation", {}), job_pb2.Evaluation(), ignore_unknown_fields=True)


def _signed(record: Mapping[str, Any]) -> bytes:
    text = json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False).removesuffix("\n}").encode()
    return text + _END.format(sum_of(text)).encode()


__all__ = ["BLOCK_BYTES", "FILE", "MAX_BYTES", "FileEntry", "Manifest", "sum_of", "sums_of"]
