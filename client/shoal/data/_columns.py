"""The conversion of Arrow columns to NumPy arrays: supported types, and the treatment of nulls."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shoal import errors
from shoal._system import load

# Estimated size of a value of variable length in memory, for the size of blocks.
_OBJECT_BYTES = 64


class Columns:
    """The selected columns of a data set.

    Args:
        schema: Arrow schema of the first file.
        names: names of the columns. None means all columns.
        fill: value that replaces nulls, by column.
        where: name of the first file, for messages.

    Raises:
        InvalidData: a column is missing, is named twice, has an unsupported type, or its fill value has another type.
    """

    def __init__(self, schema: Any, names: Sequence[str] | None, fill: Mapping[str, Any] | None, where: str) -> None:
        self._pa = load("pyarrow", "shoal.data")
        self.names = chosen(schema.names, names, where)
        self.schema = self._pa.schema([self._field(schema, name, where) for name in self.names])
        unknown = [name for name in fill or {} if name not in self.names]
        if unknown:
            raise errors.InvalidData(
                f"fill has a value for {unknown[0]!r}, which is not one of the columns {self.names}"
            )
        self._fill = {name: self._scalar(name, value) for name, value in (fill or {}).items()}

    def check(self, schema: Any, where: str) -> None:
        """Raises InvalidData unless another file has the same columns."""
        for name, field in zip(self.names, self.schema, strict=True):
            indices = schema.get_all_field_indices(name)
            found = schema.field(indices[0]).type if indices else None
            if found != field.type:
                state = f"of type {found}, but" if indices else "missing, but it exists and is"
                raise errors.InvalidData(
                    f"{where}: column {name!r} is {state} of type {field.type} in the first file; "
                    "write the files alike, or leave the column out with columns=[...]"
                )

    def row_bytes(self) -> int:
        """Returns the estimated size of one row in memory, in bytes."""
        return max(1, sum(self._width(field.type) for field in self.schema))

    def arrays(self, table: Any, where: str) -> list[np.ndarray]:
        """Returns the columns of a table or record batch as arrays, in the order of `names`.

        Args:
            table: an Arrow table or record batch.
            where: name of the file and the rows, for messages.

        Raises:
            InvalidData: a column has nulls, but no fill value.
        """
        return [self._array(_in_one_piece(table.column(name)), name, where) for name in self.names]

    def _field(self, schema: Any, name: str, where: str) -> Any:
        field = schema.field(name)
        if (problem := self._problem(field.type)) is not None:
            raise errors.InvalidData(
                f"{where}: column {name!r} is of type {field.type}, which arrays do not support: {problem}; or "
                "leave it out with columns=[...]"
            )
        return self._pa.field(name, field.type)

    def _problem(self, kind: Any) -> str | None:
        """Returns what to do about an unsupported type, or None for a supported one."""
        types = self._pa.types
        if isinstance(kind, self._pa.BaseExtensionType):
            return self._problem(kind.storage_type)
        if types.is_fixed_size_list(kind):
            inner = kind.value_type
            plain = types.is_fixed_size_list(inner) or _is_number(types, inner) or types.is_fixed_size_binary(inner)
            return self._problem(inner) if plain else "a list needs numbers in it"
        if types.is_dictionary(kind):
            return self._problem(kind.value_type)
        if types.is_list(kind) or types.is_large_list(kind):
            return "lists need a fixed size, so write it as pyarrow.list_(type, size)"
        if types.is_decimal(kind):
            return "write it as float64, or as an int64 of the smallest unit"
        if types.is_null(kind):
            return "it has nothing but nulls, so write it with values, or with a type"
        if types.is_struct(kind) or types.is_map(kind) or types.is_union(kind):
            return "write its parts as columns"
        texts = (
            types.is_string,
            types.is_large_string,
            types.is_binary,
            types.is_large_binary,
            types.is_fixed_size_binary,
        )
        dates = (types.is_date, types.is_timestamp, types.is_duration)
        known = _is_number(types, kind) or any(is_one(kind) for is_one in (*texts, *dates))
        return None if known else "write it as a number, a text or a timestamp"

    def _scalar(self, name: str, value: Any) -> Any:
        """Returns a fill value as a scalar of its column's type, or of the type of a list's elements."""
        kind = self.schema.field(name).type
        while (inner := _inner(self._pa, kind)) is not None:
            kind = inner
        try:
            return self._pa.scalar(value, kind)
        except (self._pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise errors.InvalidData(f"fill of column {name!r} is {value!r}, which is not a {kind}: {error}") from None

    def _width(self, kind: Any) -> int:
        if self._pa.types.is_fixed_size_list(kind):
            return int(kind.list_size) * self._width(kind.value_type)
        if isinstance(kind, self._pa.BaseExtensionType):
            return self._width(kind.storage_type)
        if self._pa.types.is_dictionary(kind):
            return self._width(kind.value_type)
        try:
            return max(1, int(kind.bit_width) // 8)
        except ValueError:  # no fixed width
            return _OBJECT_BYTES

    def _array(self, column: Any, name: str, where: str) -> np.ndarray:
        pa, kind = self._pa, column.type
        if isinstance(kind, pa.BaseExtensionType):
            stored = self._array(column.storage, name, where)
            shape = getattr(kind, "shape", None)  # of a tensor
            return stored if shape is None else stored.reshape(len(stored), *shape)
        if pa.types.is_dictionary(kind):
            return self._array(column.dictionary_decode(), name, where)
        if column.null_count:
            column = self._filled(column, name, where)
        if pa.types.is_fixed_size_list(kind):
            inner = self._array(column.flatten(), name, where)
            return inner.reshape(len(column), kind.list_size, *inner.shape[1:])
        if pa.types.is_fixed_size_binary(kind):
            raw = np.frombuffer(column.buffers()[1] or b"", np.uint8)
            begin = column.offset * kind.byte_width
            return raw[begin : begin + len(column) * kind.byte_width].reshape(len(column), kind.byte_width)
        array: np.ndarray = column.to_numpy(zero_copy_only=False)
        return array

    def _filled(self, column: Any, name: str, where: str) -> Any:
        value = self._fill.get(name)
        if value is None or value.type != column.type:
            advice = "write other values" if value is not None else f"give fill={{{name!r}: ...}}"
            raise errors.InvalidData(
                f"{where}: column {name!r} has {column.null_count} nulls among {len(column)} values, which arrays "
                f"cannot hold; {advice}, or leave it out with columns=[...]"
            )
        return column.fill_null(value)


def chosen(there: Sequence[str], names: Sequence[str] | None, where: str) -> list[str]:
    """Returns the names of the columns to read, in order.

    Args:
        there: names of the columns in the file.
        names: requested names. None means all columns.
        where: name of the file, for messages.

    Raises:
        InvalidData: a column is missing, is named twice, or occurs twice in the file.
    """
    if isinstance(names, str):
        names = [names]
    wanted = list(there) if names is None else list(names)
    if not wanted:
        raise errors.InvalidData(f"{where}: there are no columns to read; name at least one in columns=[...]")
    for name in wanted:
        if name not in there:
            near = difflib.get_close_matches(str(name), there, n=3)
            hint = f"did you mean {', '.join(near)}?" if near else f"it has {', '.join(there[:20])}"
            raise errors.InvalidData(f"{where} has no column {name!r}; {hint}", column=name)
        if wanted.count(name) > 1 or there.count(name) > 1:
            raise errors.InvalidData(f"{where}: column {name!r} occurs twice; name each column once")
    return wanted


def _in_one_piece(column: Any) -> Any:
    """Returns a column, which may have several chunks, as one Arrow array."""
    if not hasattr(column, "chunks"):
        return column
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _inner(pa: Any, kind: Any) -> Any:
    """Returns the type within a type, or None."""
    if isinstance(kind, pa.BaseExtensionType):
        return kind.storage_type
    return kind.value_type if pa.types.is_fixed_size_list(kind) or pa.types.is_dictionary(kind) else None


def _is_number(types: Any, kind: Any) -> bool:
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


__all__ = ["Columns", "chosen"]
