"""Short texts in requests: their length, their characters, and addresses without a scheme."""

import pytest

from shoal import errors
from shoal._wire import check_address, check_text, shortened, with_ellipsis, without_controls, without_middle


@pytest.mark.parametrize("text", ["", "cuda:0 NVIDIA H200", "x" * 256, "é" * 128, "Grafikkarte für 2 Kerne"])
def test_short_printable_texts_pass(text: str) -> None:
    check_text("device", text)


@pytest.mark.parametrize("text", ["x" * 257, "é" * 129, "x" * 5_000_000])
def test_a_long_text_is_refused_with_the_limit(text: str) -> None:
    with pytest.raises(errors.BadRequest, match=r"device of w0 has \d+ bytes; the limit FIELD_BYTES is 256") as refused:
        check_text("device of w0", text)
    assert len(refused.value.message) < 200


@pytest.mark.parametrize("text", ["a\nb", "\x1b[2J", "\x00", "a\u202eb", "\u2028", "\x7f", "\ud800"])
def test_control_characters_are_refused_and_can_be_replaced(text: str) -> None:
    with pytest.raises(errors.BadRequest, match=r"has control characters"):
        check_text("device", text)
    check_text("device", without_controls(text))


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1:1", "localhost:65535", "[::1]:7070", "[fe80::1%eth0]:80", "server-0.servers.ns.svc:7070", "a_b:1"],
)
def test_addresses_of_hosts_pass(address: str) -> None:
    check_address("address", address)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "unix:80",
        "unix:/tmp/x",
        "unix:///tmp/x:80",
        "unix-abstract:80",
        "UNIX:80",
        "vsock:80",
        "dns:80",
        "ipv4:10.0.0.1:80",
        "dns:///host:80",
        "xds:///host:80",
        "http://host:80",
        "host",
        "host:",
        "host:0",
        "host:65536",
        "host:99999999999999999999",
        "host:-1",
        "host:\u0661",
        ":80",
        "::1:80",
        "host:80\n",
        "a b:80",
        "a,b:80",
        "h" * 300 + ":80",
    ],
)
def test_anything_else_is_no_address(address: str) -> None:
    with pytest.raises(errors.BadRequest, match="address of s0"):
        check_address("address of s0", address)


@pytest.mark.parametrize("port", ["0", "65536", "99999"])
def test_a_port_out_of_range_is_named(port: str) -> None:
    with pytest.raises(errors.BadRequest, match=rf"^address is 'host:{port}'; give a port from 1 to 65535$"):
        check_address("address", f"host:{port}")


def test_a_stored_text_is_shortened_to_what_passes() -> None:
    assert shortened("é" * 200) == "é" * 128
    assert shortened("short") == "short"


def test_a_long_text_loses_its_middle() -> None:
    assert without_middle("a" * 30 + "b" * 70, 40) == f"{'a' * 10} [...] {'b' * 30}"
    assert without_middle("é" * 20, 40) == "é" * 20
    assert without_middle("\ud800", 40) == "?"


def test_a_long_line_ends_with_an_ellipsis() -> None:
    assert with_ellipsis("one two", 5) == "one…"
    assert with_ellipsis("one", 3) == "one"
