"""Requests to the metadata services, carried through lost connections. docs/client.md, Retries.

Thread-safe; each call blocks its thread until there is an answer or the policy gives up.
"""

from __future__ import annotations

import logging
import random
import time
from typing import TypeVar

from ffs.client.connection import Link
from ffs.client.retry import Attempt, Kind, Next, Policy, decide, kind_of
from ffs.errors import FfsError, OutcomeUnknown, ProtocolError
from ffs.proto.common import ErrorReply, Message, to_error
from ffs.rpc.codec import encode_message

M = TypeVar("M", bound=Message)

_log = logging.getLogger(__name__)

ONCE = Policy(deadline_s=0.0)
"""No retry: the first failure is raised. If the service failed, the next request goes to another one."""


class Caller:
    """Sends messages over a link, under a retry policy."""

    def __init__(self, link: Link, policy: Policy) -> None:
        self.link = link
        self.policy = policy

    def call(
        self, request: Message, reply: type[M], *, mutation: bool = False, policy: Policy | None = None
    ) -> M:
        """Send `request` until answered and return the reply, which must be a `reply`.

        A mutation must carry its slot and sequence: it may be sent several times. Raises the error
        that the service answers; Unreachable, ConnectionLost or DeadlineExceeded after the policy's
        deadline, and OutcomeUnknown instead if a mutation may have been carried out.
        """
        body = encode_message(request)
        policy = policy or self.policy
        progress: _Progress | None = None
        while True:
            at = self.link.at
            try:
                message = self.link.exchange(body, policy.reply_timeout_s)
            except FfsError as failure:
                error, retry_after_s = failure, 0.0
            else:
                if type(message) is reply:
                    return message
                if type(message) is not ErrorReply:
                    raise ProtocolError(f"{type(request).__name__} is answered by {type(message).__name__}")
                error, retry_after_s = to_error(message), message.retry_after_ms / 1000
            if progress is None:
                progress = _Progress(policy, mutation, len(self.link.servers))
            try:
                step = progress.after(error, retry_after_s)
            except FfsError:
                # Given up; but who asks again later, as the renewal of a session does, asks elsewhere.
                if kind_of(error) in (Kind.NOT_SENT, Kind.LOST):
                    self.link.turn_from(at)
                raise
            finally:
                # Error and frame would keep each other, and with them the locals of all who called:
                # a file that its owner drops would live on.
                del error
            if step is Next.ELSEWHERE:
                self.link.turn_from(at)


class _Progress:
    """The failed attempts of one request."""

    def __init__(self, policy: Policy, mutation: bool, servers: int) -> None:
        self._policy = policy
        self._mutation = mutation
        self._servers = servers
        self._began = time.monotonic()
        self._number = 0
        self._lost = False

    def after(self, error: FfsError, retry_after_s: float) -> Next:
        """Wait as decided and say where to send the request again, or raise."""
        attempt = Attempt(
            kind=kind_of(error),
            number=self._number,
            elapsed_s=time.monotonic() - self._began,
            servers=self._servers,
            lost_before=self._lost,
            mutation=self._mutation,
            retry_after_s=retry_after_s,
        )
        decision = decide(self._policy, attempt, random.random())
        _log.info("attempt %d failed after %.1f s: %s", self._number + 1, attempt.elapsed_s, error)
        try:
            if decision.next is Next.RAISE:
                raise error
            if decision.next is Next.RAISE_UNKNOWN:
                raise OutcomeUnknown(f"the request may have been carried out: {error}") from error
        finally:
            del error  # as in Caller.call
        self._number += 1
        self._lost = self._lost or attempt.kind is Kind.LOST
        if decision.delay_s:
            time.sleep(decision.delay_s)
        return decision.next
