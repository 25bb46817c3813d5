"""A program's description: its variables and the number of its samples. The descriptions of all workers must agree."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

from shoal.initializers import Given
from shoal.v1 import tensor_pb2
from shoal.variables import Variable
from shoal.variables import from_proto as variable_from_proto


@dataclass(frozen=True)
class ProgramDescription:
    """What a program trains.

    Attributes:
        variables: its variables, by name.
        samples: samples in one epoch; 0 if it has no data set.
        digest: digest of the variables as a worker sent them (`digest_of`). Equal digests mean equal variables;
            different ones may still describe equal variables. Empty if it is not known.
    """

    variables: Mapping[str, Variable]
    samples: int
    digest: bytes = b""

    @cached_property
    def given(self) -> frozenset[str]:
        """The variables whose initial values a worker has to send."""
        return frozenset(name for name, it in self.variables.items() if isinstance(it.initializer, Given))

    @cached_property
    def encoded(self) -> bytes:
        """The variables as a serialized Placement that has nothing else; encoded once, because that takes long."""
        messages = [variable.to_proto(name) for name, variable in self.variables.items()]
        return tensor_pb2.Placement(variables=messages).SerializeToString(deterministic=True)

    @classmethod
    def from_proto(
        cls, messages: Iterable[tensor_pb2.Variable], samples: int, digest: bytes = b""
    ) -> "ProgramDescription":
        """Returns the description in messages that were stored, or checked.

        Args:
            messages: the variables, each of another name.
            samples: samples in one epoch.
            digest: their digest, if it is known.

        Returns:
            The description, with its encoded form.

        Raises:
            InvalidVariable: a variable is not valid.
        """
        found = cls(dict(map(variable_from_proto, messages)), samples, digest)
        _ = found.encoded
        return found

    def conflict(self, second: "ProgramDescription") -> str:
        """Returns how another description of the same job differs; empty if it does not."""
        if self.samples != second.samples:
            return f"{second.samples} samples instead of {self.samples}"
        if self.digest and self.digest == second.digest:  # of 60,000 variables, the comparison takes 74 ms
            return ""
        for name in sorted(self.variables.keys() | second.variables.keys()):
            here, there = self.variables.get(name), second.variables.get(name)
            if here is None or there is None:
                return f"variable {name!r} is in only one of the two descriptions"
            if here != there:
                return f"variable {name!r} is {there} instead of {here}"
        return ""


def digest_of(messages: Iterable[tensor_pb2.Variable]) -> bytes:
    """Returns the SHA-256 digest of some variables, in the order of their names."""
    ordered = tensor_pb2.Placement(variables=sorted(messages, key=attrgetter("name")))
    return hashlib.sha256(ordered.SerializeToString(deterministic=True)).digest()


__all__ = ["ProgramDescription", "digest_of"]
