"""Copies sessions out of slots and back into them, between the steps of those who run.

Everything here happens on the device thread. Keys and values are copied piece by piece, for about
half as long as the last step took, so that no user waits two steps for the next token.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple, Optional

from glm_multiuser.engine.request import Request, user_of
from glm_multiuser.engine.runner import Runner
from glm_multiuser.sessions.identity import Identity
from glm_multiuser.sessions.session import CacheBytes, Session
from glm_multiuser.sessions.store import SessionStore

logger = logging.getLogger(__name__)

SHARE = 0.5
"""Of the last step's time, that copying takes between two steps."""
IDLE_SECONDS = 0.02
"""Of copying at a time while nothing runs; then it is seen whether something does."""


class _Held(NamedTuple):
    """What an idle user's slot holds."""

    slot: int
    identity: Identity
    token_ids: Sequence[int]


@dataclass
class _Saving:
    """A session on its way out of its slot."""

    user: Hashable
    held: _Held
    rest: Iterator[CacheBytes]
    pieces: list[CacheBytes] = field(default_factory=list)


@dataclass
class _Restoring:
    """A session on its way into a slot."""

    request: Request
    identity: Identity
    tokens: int
    rest: Iterator[None]


class SlotSessions:
    """Sessions of the users of one engine's slots.

    Args:
        runner: copies keys and values.
        store: keeps sessions.
        reuse: whether a model can go on from keys and values; otherwise none is restored.
    """

    def __init__(self, runner: Runner, store: SessionStore, reuse: bool) -> None:
        self.store = store
        self._runner = runner
        self._reuse = reuse
        self._held: dict[Hashable, _Held] = {}
        """Idle users with tokens; the least recently used comes first."""
        self._unsaved: dict[Hashable, None] = {}
        """Those of them whose tokens the store does not have."""
        self._wanted: dict[Hashable, list[Future[Session]]] = {}
        """Those of them whose slot is to be taken, and who waits for a copy of it."""
        self._saving: Optional[_Saving] = None
        self._restoring: dict[int, _Restoring] = {}

    # What the scheduler asks.

    def ready(self, request: Request) -> bool:
        """Whether the session of a waiting request is in a slot or in memory, or there is none."""
        identity = self._restores(request)
        if identity is None or request.holder in self._held:
            return True
        return self.store.ready(identity, lambda: request.cancelled)

    def may_evict(self, user: Hashable) -> bool:
        """Whether the slot of an idle user may be taken: what it holds is kept, or cannot be."""
        if user in self._unsaved and user not in self._wanted:
            if self._has_room(self._held[user]):
                self._wanted[user] = []
            else:
                del self._unsaved[user]
        return user not in self._unsaved

    def evicted(self, user: Hashable) -> None:
        """An idle user has no slot any more."""
        self._drop(user)

    def enter(self, slot: int, request: Request) -> bool:
        """A request has got its slot; returns whether a session is copied into it first."""
        held = self._held.get(request.holder)
        self._drop(request.holder)
        identity = self._restores(request)
        if identity is None:
            return False
        session = self.store.take(identity)
        tokens = request.common(session.token_ids) if session and not held else 0
        if session is None or not tokens:
            self.store.drop_inserted(identity)
            return False
        rest = self._runner.write_slot(slot, tokens, session.pieces)
        self._restoring[slot] = _Restoring(request, identity, tokens, rest)
        return True

    def leave(self, slot: int, request: Request, keep: bool, failed: bool) -> None:
        """A request has left its slot; `keep` left the slot to its user."""
        self._restoring.pop(slot, None)
        if request.identity is None:
            return
        if failed:
            self.store.discard(request.identity)  # what failed is not tried again
        elif keep and request.computed_tokens:
            held = _Held(slot, request.identity, request.held_token_ids())
            self._held[request.holder] = held
            if self.store.keeps:
                self._unsaved[request.holder] = None

    # What the engine asks.

    def work(self, step_seconds: Optional[float]) -> tuple[bool, list[int]]:
        """Copies for a while -> whether there was anything, and slots whose sessions are in.

        Args:
            step_seconds: of the last step; None while nothing runs.
        """
        seconds = IDLE_SECONDS if step_seconds is None else SHARE * step_seconds
        until = time.perf_counter() + seconds
        done: list[int] = []
        copied = False
        while self._copy_piece(done):
            copied = True
            if time.perf_counter() >= until:
                break
        return copied, done

    def export(self, user: Hashable) -> Optional[Future[Session]]:
        """A copy of what an idle user's slot holds, which `work` makes; None if it holds nothing.

        Its error is a KeyError if meanwhile the slot has changed.
        """
        if user not in self._held:
            return None
        future: Future[Session] = Future()
        self._wanted.setdefault(user, []).append(future)
        return future

    def export_all(self) -> list[Future[Session]]:
        """Copies of every idle user's slot that the store does not have, and will keep."""
        every = self.store.writes_behind
        users = [user for user in self._unsaved if every or self._has_room(self._held[user])]
        futures = map(self.export, users)
        return [future for future in futures if future is not None]

    def flush(self) -> None:
        """Saves every idle user's session at once, as everything in the slots is about to go."""
        self._restoring = {}
        self.export_all()
        while self._copy_piece([]):
            pass
        self.reset()

    def reset(self) -> None:
        """Nothing is in the slots any more."""
        self._restoring = {}
        for user in list(self._held):
            self._drop(user)

    def of_owner(self, owner: str) -> list[tuple[Hashable, _Held]]:
        """The idle users of a tenant, by their names."""
        held = list(self._held.items())
        return [(user_of(holder), one) for holder, one in held if one.identity.owner == owner]

    def _restores(self, request: Request) -> Optional[Identity]:
        """Of the session that its prompt may begin with; None if it may not, or has begun."""
        may_begin = request.params.reuses_prompt and request.saved_past is None
        return request.identity if self._reuse and may_begin else None

    def _drop(self, user: Hashable) -> None:
        """The user's slot is about to change."""
        self._held.pop(user, None)
        self._unsaved.pop(user, None)
        for future in self._wanted.pop(user, []):
            future.set_exception(KeyError(user))
        if self._saving is not None and self._saving.user == user:
            self._saving = None

    def _has_room(self, held: _Held) -> bool:
        return self.store.has_room(self._runner.slot_bytes(len(held.token_ids)))

    def _copy_piece(self, done: list[int]) -> bool:
        """Copies one piece; returns whether there may be more."""
        if self._restoring:
            slot = next(iter(self._restoring))
            if self._restore_piece(self._restoring[slot]):
                del self._restoring[slot]
                done.append(slot)
            return True
        if self._saving is None:
            self._saving = self._next()
        if self._saving is None:
            return False
        self._save_piece(self._saving)
        return True

    def _restore_piece(self, one: _Restoring) -> bool:
        """Returns whether that was the last."""
        try:
            next(one.rest)
            return False
        except StopIteration:
            one.request.cached_tokens = one.request.computed_tokens = one.tokens
            self.store.restored(one.identity, one.tokens)
        except Exception:  # the slot's rows stay unread: nothing counts as computed
            logger.exception("a session is ignored: it could not be copied into a slot")
            self.store.discard(one.identity)
        return True

    def _next(self) -> Optional[_Saving]:
        """Who is saved next: whose slot is needed, or the one that has been idle for longest."""
        for user in [*self._wanted, *(self._unsaved if self.store.writes_behind else ())]:
            held = self._held[user]
            if self._wanted.get(user) or self._has_room(held):
                return _Saving(user, held, self._pieces(held))
            if user in self._wanted:  # its slot is needed more
                del self._wanted[user]
                self._unsaved.pop(user, None)
        return None

    def _pieces(self, held: _Held) -> Iterator[CacheBytes]:
        """A slot that cannot be reused may not hold them any more."""
        if not self._reuse:
            return iter(())
        return self._runner.read_slot(held.slot, len(held.token_ids))

    def _save_piece(self, one: _Saving) -> None:
        try:
            one.pieces.append(next(one.rest))
            return
        except StopIteration:
            session = Session(one.held.token_ids, one.pieces)
            if one.user in self._unsaved:
                self.store.put(one.held.identity, session)
            for future in self._wanted.pop(one.user, []):
                future.set_result(session)
        except Exception as error:
            logger.exception("a session is not kept: it could not be copied out of its slot")
            for future in self._wanted.pop(one.user, []):
                future.set_exception(error)
        self._saving = None
        self._unsaved.pop(one.user, None)
