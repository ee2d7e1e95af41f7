"""The assertion that every user is in one update, on which the price of a run depends."""

from __future__ import annotations

from dptune.errors import DptuneError


class UserReuseError(DptuneError):
    """A user arrived a second time; the guarantee is about users who are in one update."""


class Met:
    """The users who were in an update: no user may be in two."""

    def __init__(self) -> None:
        self._users: set[int] = set()

    def admit(self, users: tuple[int, ...]) -> None:
        """Add users. Raises UserReuseError naming the first who was in an earlier update."""
        for user in users:
            if user in self._users:
                raise UserReuseError(
                    f"user {user} is in a second update, and the guarantee is for users who are in one. "
                    "Fix: reset the environment for every user (continuing: false)."
                )
            self._users.add(user)
