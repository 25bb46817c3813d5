"""Fuzzed protobuf messages: fields by their descriptors, with names that exist and values at the edges of types."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from support.fuzzing.mutator import EDGES_64, ODD_FLOATS, mutated

_SIGNED = {FieldDescriptor.CPPTYPE_INT32: 31, FieldDescriptor.CPPTYPE_INT64: 63}
_UNSIGNED = {FieldDescriptor.CPPTYPE_UINT32: 32, FieldDescriptor.CPPTYPE_UINT64: 64}
_FLOATS = (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT)
_ODD_TEXTS = ("", "x" * 300, "../../etc/passwd", "a/b", "a\0b", "\u202eabc", "a\nb", "\x1b[2J", "é" * 200, "[" * 2000)
_MOST_DEPTH = 6


class Drawer:
    """Draws messages of any kind.

    Args:
        words: texts and numbers that the receiver knows, by the name of the field that has them.
    """

    def __init__(self, words: Mapping[str, Sequence[Any]]) -> None:
        self._words = words

    def encoded(self, draw: random.Random, kind: type[Message], seeds: Sequence[bytes] = ()) -> bytes:
        """Returns an encoded message: drawn field by field, a changed seed, or either with changed bytes.

        Args:
            draw: the source of all choices.
            kind: class of the message.
            seeds: encoded messages that are valid.
        """
        if seeds and draw.random() < 0.4:
            return mutated(draw, seeds)
        message = kind()
        if seeds and draw.random() < 0.7:
            message.MergeFromString(draw.choice(seeds))
            self._change(draw, message)
        else:
            self._fill(draw, message, 0)
        encoded = message.SerializePartialToString()
        return mutated(draw, [encoded, *seeds]) if draw.random() < 0.2 else encoded

    def _change(self, draw: random.Random, message: Message) -> None:
        """Changes one to three fields, at any depth."""
        for _ in range(draw.randint(1, 3)):
            place: Any = message
            for _ in range(_MOST_DEPTH):
                below = [value for field, value in place.ListFields() if _is_single_message(field)]
                below += [
                    one
                    for field, value in place.ListFields()
                    if field.message_type and field.is_repeated and not _is_map(field)
                    for one in value[:2]
                ]
                if not below or draw.random() < 0.3:
                    break
                place = draw.choice(below)
            fields = place.DESCRIPTOR.fields
            if fields:
                self._set(draw, place, draw.choice(fields), _MOST_DEPTH - 2)

    def _fill(self, draw: random.Random, message: Any, depth: int) -> None:
        for field in message.DESCRIPTOR.fields:
            if draw.random() < (0.8 if depth < 2 else 0.5):
                self._set(draw, message, field, depth)

    def _set(self, draw: random.Random, message: Any, field: Any, depth: int) -> None:
        if depth >= _MOST_DEPTH:
            return
        if _is_map(field):
            self._set_map(draw, message, field, depth)
        elif field.is_repeated:
            message.ClearField(field.name)
            count = draw.choice((0, 1, 1, 2, 3, 40))
            if field.message_type:
                for _ in range(min(count, 3)):
                    self._fill(draw, getattr(message, field.name).add(), depth + 1)
            else:
                getattr(message, field.name).extend(self._scalar(draw, field) for _ in range(count))
        elif field.message_type:
            self._fill(draw, getattr(message, field.name), depth + 1)
        else:
            setattr(message, field.name, self._scalar(draw, field))

    def _set_map(self, draw: random.Random, message: Any, field: Any, depth: int) -> None:
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        target = getattr(message, field.name)
        for _ in range(draw.choice((0, 1, 2, 20))):
            if value.message_type:
                self._fill(draw, target[self._scalar(draw, key)], depth + 1)
            else:
                target[self._scalar(draw, key)] = self._scalar(draw, value)

    def _scalar(self, draw: random.Random, field: Any) -> Any:
        known = self._words.get(field.name)
        if known and draw.random() < 0.75:
            return draw.choice(known)
        kind = field.cpp_type
        if kind in _SIGNED:
            most = 2 ** _SIGNED[kind]
            return max(-most, min(most - 1, draw.choice((1, -1)) * draw.choice(EDGES_64)))
        if kind in _UNSIGNED:
            return min(2 ** _UNSIGNED[kind] - 1, draw.choice(EDGES_64))
        if kind in _FLOATS:
            return draw.choice(
                (*ODD_FLOATS, 0.0, 0.1, 1.0, 1e-3, 3e38 if kind == FieldDescriptor.CPPTYPE_FLOAT else 1e300)
            )
        if kind == FieldDescriptor.CPPTYPE_BOOL:
            return draw.random() < 0.5
        if kind == FieldDescriptor.CPPTYPE_ENUM:
            return draw.choice((*(value.number for value in field.enum_type.values), 99, -1))
        if field.type == FieldDescriptor.TYPE_BYTES:
            return draw.randbytes(draw.choice((0, 4, 16, 64)))
        return draw.choice((*_ODD_TEXTS, "a", "job", "w"))


def _is_map(field: Any) -> bool:
    return bool(field.message_type and field.message_type.GetOptions().map_entry)


def _is_single_message(field: Any) -> bool:
    return bool(field.message_type) and not field.is_repeated
