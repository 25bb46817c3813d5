"""The service of tokens and tickets, and the checks that a caller acts only for itself."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import grpc
import structlog

from shoal import _rpc, errors
from shoal._security import ID_PREFIX, MEMBER_ROLES, check_own
from shoal.v1 import coordinator_pb2 as members_pb
from shoal.v1 import token_pb2 as pb
from shoal.v1 import token_pb2_grpc
from shoal_coordinator.access import UNKNOWN_HOLDER, Access, TokenInfo
from shoal_coordinator.coordinator import Coordinator
from shoal_coordinator.decision import Check
from shoal_coordinator.logins import CODE_S, Logins
from shoal_coordinator.member_holders import changes, check_ticket

_log = structlog.get_logger(__name__)


class TokensService(token_pb2_grpc.TokensServicer):
    """The service of tokens.

    Args:
        coordinator: The shell.
        access: The cluster's tokens. None means that the cluster asks for none.
        logins: The logins of the page. None if the cluster asks for no tokens.
        page: Returns the URL of the page; empty if there is none.
        renew_local_tokens: Writes other tokens to the access file.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        access: Access | None,
        logins: Logins | None = None,
        page: Callable[[], str] = str,
        renew_local_tokens: Callable[[], None] = lambda: None,
    ) -> None:
        self._coordinator, self._access, self._logins, self._page = coordinator, access, logins, page
        self._renew_local_tokens = renew_local_tokens

    @_rpc.servicer
    def GetTicket(self, request: pb.GetTicketRequest, _: grpc.ServicerContext) -> pb.GetTicketReply:
        caller = _rpc.caller()
        if self._access is None or caller is None:
            return pb.GetTicketReply()
        check_own(caller, request.job, request.worker, request.incarnation)
        with self._coordinator.reading() as (cluster, _now):
            role = check_ticket(cluster, caller, request.job, request.worker, request.incarnation)
        ticket, valid_s = self._access.ticket(caller, role, request.job, request.worker, request.incarnation)
        return pb.GetTicketReply(ticket=ticket, valid_s=valid_s)

    @_rpc.servicer
    def GetLoginLink(self, request: pb.GetLoginLinkRequest, _: grpc.ServicerContext) -> pb.GetLoginLinkReply:
        page, caller = self._page(), _rpc.caller()
        if not page:
            raise errors.NotConfigured("the coordinator serves no page; start it with --page-listen")
        if self._logins is None or caller is None:
            return pb.GetLoginLinkReply(link=page)
        # Browsers do not send what follows the #, so it is in no server's log.
        return pb.GetLoginLinkReply(link=f"{page}/#login={self._logins.new_code(caller)}", valid_s=CODE_S)

    @_rpc.servicer
    def CreateToken(self, request: pb.CreateTokenRequest, _: grpc.ServicerContext) -> pb.CreateTokenReply:
        made, secret = self._required().create(request.name, request.role, request.valid_s)
        _log.info("made a token", token=made.id, holder=made.name, role=made.role.value, by=str(_rpc.caller()))
        return pb.CreateTokenReply(token=_message(made), secret=secret)

    @_rpc.servicer
    def RevokeToken(self, request: pb.RevokeTokenRequest, _: grpc.ServicerContext) -> pb.RevokeTokenReply:
        access = self._required()
        revoked = access.revoke(request.token)
        if access.local_revoked:  # this user's own processes must find others
            self._renew_local_tokens()
        self._coordinator.wake()  # ends the streams of the token
        _log.info("revoked tokens", tokens=[each.id for each in revoked], by=str(_rpc.caller()))
        return pb.RevokeTokenReply(tokens=map(_message, revoked))

    @_rpc.servicer
    def ListTokens(self, request: pb.ListTokensRequest, _: grpc.ServicerContext) -> pb.ListTokensReply:
        return pb.ListTokensReply(tokens=map(_message, self._required().tokens()))

    def _required(self) -> Access:
        if self._access is None:
            raise errors.NotConfigured(
                "this cluster asks for no tokens, because its coordinator was started with --insecure; start it without"
            )
        return self._access


def check_member_role(request: members_pb.RegisterRequest) -> None:
    """Checks that the caller may be a member of the role that it registers in.

    Raises:
        Forbidden: its token is for another role.
    """
    caller = _rpc.caller()
    role = members_pb.Role.Name(request.role).lower() if request.role in members_pb.Role.values() else ""
    if caller is not None and role in MEMBER_ROLES and caller.role not in MEMBER_ROLES[role]:
        wanted = " or ".join(sorted(each.value for each in MEMBER_ROLES[role]))
        raise errors.Forbidden(
            f"{caller} may not register as a {role}; that needs a token of the role {wanted}", role=role
        )


def of_its_job(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a handler that reads a job, so that the holder of a ticket can call it only for the job of the ticket."""

    @wraps(method)
    def handler(self: Any, request: Any, context: grpc.ServicerContext) -> Any:
        check_own(_rpc.caller(), request.job, "", 0)
        return method(self, request, context)

    return handler


def for_itself(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a handler that changes a job. In place of the call's context, the handler gets the check of its event."""

    @wraps(method)
    def handler(self: Any, request: Any, _: grpc.ServicerContext) -> Any:
        return method(self, request, check_of(request))

    return handler


def check_of(request: Any) -> Check:
    """Returns the check that precedes the event of a request: that its caller acts only for itself.

    The coordinator makes this check under the lock under which it handles the event, because the job can change its
    owner in between: somebody drops it, and somebody else submits it again. The names of a ticket never change. So
    they are compared at once.

    Raises:
        Forbidden: The caller's ticket is for another participant. The check itself raises as `check_change`.
    """
    caller, worker, incarnation = _rpc.caller(), getattr(request, "worker", ""), getattr(request, "incarnation", 0)
    check_own(caller, request.job, worker, incarnation)
    return changes(caller, request.job, worker, incarnation)


def _message(token: TokenInfo) -> pb.Token:
    if token.id.startswith(ID_PREFIX):  # its expiry is not known, and its holder only if it has called
        known = token.name != UNKNOWN_HOLDER
        name, role = (token.name, token.role.value) if known else ("", "")
        return pb.Token(id=token.id, name=name, role=role, revoked=token.revoked)
    return pb.Token(
        id=token.id, name=token.name, role=token.role.value, expires_at=token.expires_at, revoked=token.revoked
    )


__all__ = ["TokensService", "check_member_role", "check_of", "for_itself", "of_its_job"]
