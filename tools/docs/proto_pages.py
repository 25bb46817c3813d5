"""The reference of the protocol, from the descriptors of `protos/` and the comments in them."""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from google.protobuf import descriptor_pb2 as descriptors
from markdown_text import code, page, table, text

ROOT = Path(__file__).parents[2]
PACKAGE = "shoal.v1"
_TYPES = descriptors.FieldDescriptorProto.Type
# The fields of descriptor.proto that hold what is nested: the steps of a path to a comment.
_FILE_MESSAGES, _FILE_ENUMS, _FILE_SERVICES = 4, 5, 6
_MESSAGE_FIELDS, _MESSAGE_MESSAGES, _MESSAGE_ENUMS, _MESSAGE_ONEOFS = 2, 3, 4, 8
_ENUM_VALUES = _SERVICE_METHODS = 2

Path_ = tuple[int, ...]


def descriptor_set() -> descriptors.FileDescriptorSet:
    """Returns the descriptors of all protos, with the positions of their comments."""
    with tempfile.NamedTemporaryFile(suffix=".pb") as out:
        protos = sorted(str(proto.relative_to(ROOT / "protos")) for proto in (ROOT / "protos").rglob("*.proto"))
        command = [sys.executable, "-m", "grpc_tools.protoc", "-Iprotos", "--include_source_info"]
        subprocess.run([*command, f"--descriptor_set_out={out.name}", *protos], cwd=ROOT, check=True)
        return descriptors.FileDescriptorSet.FromString(Path(out.name).read_bytes())


class _File:
    """One proto file, as a page."""

    def __init__(self, file: descriptors.FileDescriptorProto, homes: dict[str, str]) -> None:
        self._file = file
        self._homes = homes
        self._comments: dict[Path_, str] = {}
        self._syntax = ""
        for location in file.source_code_info.location:
            comment = location.leading_comments + location.trailing_comments
            self._comments[tuple(location.path)] = comment
        self._syntax = self._comments.get((12,), "")  # above `syntax`: the file's own comment

    def page(self) -> str:
        lines = [f"# {self._file.name.rpartition('/')[2]}", "", *self._prose(self._syntax)]
        for index, service in enumerate(self._file.service):
            lines += self._service(service, (_FILE_SERVICES, index))
        for index, message in enumerate(self._file.message_type):
            lines += self._message(message, f"{PACKAGE}.{message.name}", (_FILE_MESSAGES, index))
        for index, enum in enumerate(self._file.enum_type):
            lines += self._enum(enum, f"{PACKAGE}.{enum.name}", (_FILE_ENUMS, index))
        return page(lines)

    def _prose(self, comment: str) -> list[str]:
        return [line for block in _blocks(comment) for line in (block, "")]

    def _cell(self, path: Path_) -> str:
        return "<br>".join(_blocks(self._comments.get(path, "")))

    def _heading(self, full: str, kind: str, path: Path_) -> list[str]:
        shown = full.removeprefix(f"{PACKAGE}.")
        return [f"## {kind} `{shown}` {{ #{shown} }}", "", *self._prose(self._comments.get(path, ""))]

    def _link(self, full: str) -> str:
        name = full.removeprefix(".")
        if name not in self._homes:
            return code(name)
        shown, home = name.removeprefix(f"{PACKAGE}."), self._homes[name]
        return f"[`{shown}`]({'' if home == self._file.name else _file_name(home)}#{shown})"

    def _service(self, service: descriptors.ServiceDescriptorProto, path: Path_) -> Iterator[str]:
        yield from self._heading(f"{PACKAGE}.{service.name}", "service", path)
        for index, method in enumerate(service.method):
            yield from (f"### rpc `{method.name}` {{ #{service.name}.{method.name} }}", "")
            request = f"{'stream ' if method.client_streaming else ''}{self._link(method.input_type)}"
            reply = f"{'stream ' if method.server_streaming else ''}{self._link(method.output_type)}"
            yield from (f"{request} → {reply}", "")
            yield from self._prose(self._comments.get((*path, _SERVICE_METHODS, index), ""))

    def _message(self, message: descriptors.DescriptorProto, full: str, path: Path_) -> Iterator[str]:
        if message.options.map_entry:
            return
        yield from self._heading(full, "message", path)
        for index, oneof in enumerate(message.oneof_decl):
            comment = self._cell((*path, _MESSAGE_ONEOFS, index))
            if comment:
                yield from (f"Of {code(oneof.name)}: {comment}", "")
        entries = {nested.name: nested for nested in message.nested_type if nested.options.map_entry}
        rows = [
            [str(field.number), code(field.name), self._type(field, message, entries), self._cell(where)]
            for index, field in enumerate(message.field)
            for where in [(*path, _MESSAGE_FIELDS, index)]
        ]
        yield from table(["number", "field", "type", "meaning"], rows) if rows else ("No fields.", "")
        for index, nested in enumerate(message.nested_type):
            yield from self._message(nested, f"{full}.{nested.name}", (*path, _MESSAGE_MESSAGES, index))
        for index, enum in enumerate(message.enum_type):
            yield from self._enum(enum, f"{full}.{enum.name}", (*path, _MESSAGE_ENUMS, index))

    def _type(
        self,
        field: descriptors.FieldDescriptorProto,
        message: descriptors.DescriptorProto,
        entries: dict[str, descriptors.DescriptorProto],
    ) -> str:
        entry = entries.get(field.type_name.rpartition(".")[2])
        if entry is not None:
            key, value = (self._type(part, entry, {}) for part in entry.field)
            return f"map of {key} to {value}"
        named = field.type_name != ""
        shown = self._link(field.type_name) if named else code(_TYPES.Name(field.type).removeprefix("TYPE_").lower())
        if field.label == field.LABEL_REPEATED:
            return f"repeated {shown}"
        if field.proto3_optional:
            return f"optional {shown}"
        if field.HasField("oneof_index"):
            return f"{shown}, one of {code(message.oneof_decl[field.oneof_index].name)}"
        return shown

    def _enum(self, enum: descriptors.EnumDescriptorProto, full: str, path: Path_) -> Iterator[str]:
        yield from self._heading(full, "enum", path)
        rows = [
            [str(value.number), code(value.name), self._cell((*path, _ENUM_VALUES, index))]
            for index, value in enumerate(enum.value)
        ]
        yield from table(["number", "value", "meaning"], rows)


def _blocks(comment: str) -> list[str]:
    """Returns the paragraphs and the items of lists of a comment, in Markdown."""
    return [text(block) for block in re.split(r"\n *\n|\n(?= *(?:\d+\.|-) )", comment) if block.strip()]


def _file_name(proto: str) -> str:
    return proto.rpartition("/")[2].replace(".proto", ".md")


def _names(messages: list[descriptors.DescriptorProto], prefix: str) -> Iterator[str]:
    for message in messages:
        full = f"{prefix}.{message.name}"
        yield full
        yield from (f"{full}.{enum.name}" for enum in message.enum_type)
        yield from _names(list(message.nested_type), full)


def pages() -> dict[str, str]:
    """Returns a page for each proto, and their index."""
    files = descriptor_set().file
    homes: dict[str, str] = {}
    for file in files:
        names = [*_names(list(file.message_type), PACKAGE), *(f"{PACKAGE}.{enum.name}" for enum in file.enum_type)]
        homes |= dict.fromkeys(names, file.name)
    found = {f"reference/protocol/{_file_name(file.name)}": _File(file, homes).page() for file in files}
    rows = []
    for file in files:
        services = ", ".join(code(service.name) for service in file.service)
        rows.append([f"[`{file.name}`]({_file_name(file.name)})", services, str(len(file.message_type))])
    lines = [
        "# Protocol",
        "",
        "The messages and remote calls between processes, from the comments of the proto files. Before version",
        "1.0, any of them may change, because all members of a cluster run the same version.",
        *table(["file", "services", "messages"], rows),
    ]
    return found | {"reference/protocol/index.md": page(lines)}
